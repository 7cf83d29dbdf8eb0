"""Images in a prompt's tokens: where they stand, and what is read there."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from edgespec.backends.base import Backend, ImageRun, SeesImages
from edgespec.errors import UnsupportedError
from edgespec.models.images import Image, parts_of


class ShownImages:
    """A backend's tokenizer that knows some images by their marks in texts.

    Raises UnsupportedError where there are images and the model sees none, or one is broken.
    """

    def __init__(self, backend: Backend, images: Iterable[Image]) -> None:
        self._tokenizer = backend.tokenizer
        self._pieces: dict[Image, Sequence[Sequence[int] | ImageRun]] = {}
        for image in dict.fromkeys(images):
            if not isinstance(backend, SeesImages) or not backend.sees_images:
                raise UnsupportedError(
                    "this model reads text alone, and the prompt has an image",
                    hint="--mmproj FILE names the projector of a model that sees",
                )
            self._pieces[image] = backend.image_pieces(image)

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        """Ids of a text; an image has its own, which are negative but for those around it."""
        ids: list[int] = []
        for place, part in enumerate(parts_of(text, self._pieces)):
            if isinstance(part, Image):
                for piece in self._pieces[part]:
                    ids += piece.ids if isinstance(piece, ImageRun) else piece
            elif part or not place:
                ids += self._tokenizer.encode(part, add_special=add_special and not place)
        return ids

    def token_bytes(self, token: int) -> bytes:
        """As of `Tokenizer`; an image has none."""
        return self._tokenizer.token_bytes(token) if token >= 0 else b""

    def places(self, ids: Sequence[int]) -> dict[int, ImageRun]:
        """The runs of cells in a prompt, by where they begin.

        Raises UnsupportedError for ids of other images, and for images that the prompt lacks.
        """
        runs = {
            piece.ids[0]: piece
            for pieces in self._pieces.values()
            for piece in pieces
            if isinstance(piece, ImageRun)
        }
        found: dict[int, ImageRun] = {}
        place = 0
        while place < len(ids):
            if ids[place] >= 0:
                place += 1
                continue
            run = runs.get(ids[place])
            if run is None or tuple(ids[place : place + len(run.ids)]) != run.ids:
                raise UnsupportedError(f"token id {ids[place]} is not in the vocabulary")
            found[place] = run
            place += len(run.ids)
        if {run.image for run in found.values()} != set(self._pieces):
            raise UnsupportedError(
                "an image was given that the prompt does not show",
                hint='make it a part of a message: {"type": "image", "image": ...}',
            )
        if ids and ids[-1] < 0:
            raise UnsupportedError("the prompt ends with an image", hint="put a text behind it")
        return found
