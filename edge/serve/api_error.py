"""What a client is told when it does not get what it asked for, and what the log is told then."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from edgespec.errors import (
    BackendError,
    ContextFullError,
    EdgespecError,
    ModelFileError,
    UnsupportedError,
)
from edgespec.log import REQUEST_ID, places_of

LOGGER = logging.getLogger("edgespec.serve")

COME_AGAIN = (429, 503, 529)  # answers with these say when
_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    501: "not_supported_error",
    503: "overloaded_error",
}
_ANTHROPIC = ("/v1/messages/", "/messages/")  # at and below these errors have their form
OLLAMA = "/api/"  # below it errors have Ollama's form, and streams are lines
_ANTHROPIC_KINDS = {413: "request_too_large", 500: "api_error", 501: "api_error"}  # others alike


class ApiError(Exception):
    """A request that is not answered.

    Args:
        message: one sentence.
        param: the field that is wrong, as the client wrote it.
        code: a word that programs may compare.
        more: numbers that programs may read.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        more: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code, self.more = status, param, code, more

    @property
    def document(self) -> dict[str, Any]:
        """The error object of OpenAI's interface."""
        kind = _KINDS.get(self.status, "invalid_request_error")
        error = {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        return {"error": {**error, **self.more}}


def openai_error(problem: ApiError) -> dict[str, Any]:
    """The error object of OpenAI's interface."""
    return problem.document


def anthropic_error(problem: ApiError) -> dict[str, Any]:
    """The error object of Anthropic's interface; it has what OpenAI's has as well."""
    error = problem.document["error"]
    kind = _ANTHROPIC_KINDS.get(problem.status, error["type"])
    return {"type": "error", "error": {**error, "type": kind}}


def ollama_error(problem: ApiError) -> dict[str, Any]:
    """The error of Ollama's interface."""
    return {"error": str(problem)}


def error_form(path: str) -> Callable[[ApiError], dict[str, Any]]:
    """How errors are told at a path."""
    if path.startswith(OLLAMA):
        return ollama_error
    return anthropic_error if f"{path}/".startswith(_ANTHROPIC) else openai_error


def api_error_of(problem: Exception, param: str | None = None) -> ApiError:
    """What a client is told of a failure. What is not the client's to mend has the status 500."""
    if isinstance(problem, ApiError):
        return problem
    if not isinstance(problem, EdgespecError):
        return _failed(problem, type(problem).__name__)
    hint = f" ({problem.hint})" if problem.hint else ""
    message = f"{problem}{hint}"
    if isinstance(problem, ContextFullError):
        return ApiError(message, param=param, code="context_length_exceeded")
    if isinstance(problem, UnsupportedError | ModelFileError):  # a template fails on its messages
        return ApiError(message, param=param)
    known = str(problem) if isinstance(problem, BackendError) else type(problem).__name__
    return _failed(problem, known)


def _failed(problem: Exception, known: str) -> ApiError:
    """Log a failure of the server, and name the request by which it is found in the log."""
    request_id = REQUEST_ID.get()
    LOGGER.error("%s failed: %s\n%s", request_id or "a request", known, places_of(problem))
    where = f" (request {request_id})" if request_id else ""
    return ApiError(f"the server failed: {known}{where}", status=500)
