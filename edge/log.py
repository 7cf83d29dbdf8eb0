"""The log: Python's loggers below `edgespec`. Who uses the package says where it goes.

    edgespec.cli     what a person is told on stderr
    edgespec.decode  steps that take far longer than predicted
    edgespec.llama   what llama.cpp says
    edgespec.prompts prompts and answers of a server; silent unless its level is set
    edgespec.serve   requests, answers, errors and failures
    edgespec.setup   what is loaded

No other record has a prompt, an answer, a header or a key in it.
"""

from __future__ import annotations

import logging
import traceback
from contextvars import ContextVar

REQUEST_ID: ContextVar[str] = ContextVar("request_id", default="")  # of the request being answered

logging.getLogger("edgespec").addHandler(logging.NullHandler())  # else Python prints warnings

PROMPTS = logging.getLogger("edgespec.prompts")
PROMPTS.setLevel(logging.CRITICAL)


def places_of(problem: BaseException) -> str:
    """Where a problem, and what it came of, was raised.

    Its message is left out, since it may quote a prompt.
    """
    earlier = problem.__cause__ or (None if problem.__suppress_context__ else problem.__context__)
    before = "" if earlier is None else f"{places_of(earlier)}\nwhich led to:\n"
    return (
        f"{before}{type(problem).__name__}\n{''.join(traceback.format_tb(problem.__traceback__))}"
    )
