"""What a client is told when it does not get what it asked for."""

from __future__ import annotations

from typing import Any

from edgespec.errors import (
    BackendError,
    ContextFullError,
    EdgespecError,
    ModelFileError,
    UnsupportedError,
)

COME_AGAIN = (429, 503)  # answers with these say when
_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "overloaded_error",
    500: "server_error",
    501: "not_supported_error",
    503: "overloaded_error",
}


class Refusal(Exception):
    """A request that is not answered.

    Args:
        message: one sentence.
        param: the field that is wrong, as the client wrote it.
        code: a word that programs may compare.
    """

    def __init__(
        self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code

    @property
    def document(self) -> dict[str, Any]:
        """The error object of OpenAI's interface."""
        kind = _KINDS.get(self.status, "invalid_request_error")
        error = {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        return {"error": error}


def openai_error(refusal: Refusal) -> dict[str, Any]:
    """The error object of OpenAI's interface."""
    return refusal.document


def anthropic_error(refusal: Refusal) -> dict[str, Any]:
    """The error object of Anthropic's interface; it has what OpenAI's has as well."""
    return {"type": "error", **refusal.document}


def refusal_of(problem: Exception, param: str | None = None) -> Refusal:
    """What a client is told of a failure. What is not the client's to mend has the status 500."""
    if isinstance(problem, Refusal):
        return problem
    if not isinstance(problem, EdgespecError):
        return Refusal(f"the server failed: {type(problem).__name__}", status=500)
    hint = f" ({problem.hint})" if problem.hint else ""
    message = f"{problem}{hint}"
    if isinstance(problem, ContextFullError):
        return Refusal(message, param=param, code="context_length_exceeded")
    if isinstance(problem, UnsupportedError | ModelFileError):  # a template fails on its messages
        return Refusal(message, param=param)
    known = str(problem) if isinstance(problem, BackendError) else type(problem).__name__
    return Refusal(f"the server failed: {known}", status=500)
