"""Answers of `/v1/responses` that later requests go on from: in memory, and only as many as fit."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from edgespec.serve.refusal import Refusal

_EXTRA_BYTES = 512  # of a response, besides its text


@dataclass(frozen=True, slots=True)
class _Kept:
    text: bytes  # of a JSON list: the document, and all items up to its own
    item_ids: tuple[str, ...]  # of its output

    @property
    def nbytes(self) -> int:
        return len(self.text) + _EXTRA_BYTES * (1 + len(self.item_ids))


class KeptResponses:
    """Responses by the API key that they were asked for with, the least recently used first.

    A key sees its own alone: to another one a response is not there.

    Args:
        most_bytes: of all of them; a larger one is not kept.
        most: how many.
    """

    def __init__(self, most_bytes: int, most: int) -> None:
        self._most_bytes, self._most = most_bytes, most
        self._kept: OrderedDict[tuple[str, str], _Kept] = OrderedDict()
        self._of_item: dict[tuple[str, str], str] = {}  # the response of an item
        self._bytes = 0
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        """Bytes of those that are kept."""
        return self._bytes

    def add(self, owner: str, document: dict[str, Any], items: list[Any]) -> None:
        """Keep a response; `items` is the conversation with its output at the end."""
        item_ids = tuple(str(one.get("id")) for one in document["output"])
        kept = _Kept(json.dumps([document, items], ensure_ascii=False).encode(), item_ids)
        if kept.nbytes > self._most_bytes:
            return
        with self._lock:
            self._kept[owner, document["id"]] = kept
            self._of_item |= {(owner, one): document["id"] for one in item_ids}
            self._bytes += kept.nbytes
            while self._bytes > self._most_bytes or len(self._kept) > self._most:
                self._drop(next(iter(self._kept)))

    def document(self, owner: str, identity: str) -> dict[str, Any]:
        """A response. Raises Refusal where it is not there."""
        found: dict[str, Any] = json.loads(self._text(owner, identity))[0]
        return found

    def items(self, owner: str, identity: str) -> list[Any]:
        """The conversation up to a response, its output included. Raises as `document`."""
        found: list[Any] = json.loads(self._text(owner, identity))[1]
        return found

    def item(self, owner: str, identity: str) -> dict[str, Any] | None:
        """An item of the output of any of them; None where it is not there."""
        response = self._of_item.get((owner, identity))
        if response is None:
            return None
        output: list[dict[str, Any]] = self.document(owner, response)["output"]
        return next((one for one in output if one.get("id") == identity), None)

    def remove(self, owner: str, identity: str) -> None:
        """Forget one. Raises as `document`."""
        self._text(owner, identity)
        with self._lock:
            if (owner, identity) in self._kept:
                self._drop((owner, identity))

    def _text(self, owner: str, identity: str) -> bytes:
        with self._lock:
            kept = self._kept.get((owner, identity))
            if kept is not None:
                self._kept.move_to_end((owner, identity))
                return kept.text
        raise Refusal(
            "there is no such response here: responses are kept in memory, the last ones, and "
            "only with store: true; send the whole conversation as input",
            status=404,
            code="response_not_found",
        )

    def _drop(self, key: tuple[str, str]) -> None:
        kept = self._kept.pop(key)
        self._bytes -= kept.nbytes
        for one in kept.item_ids:
            self._of_item.pop((key[0], one), None)
