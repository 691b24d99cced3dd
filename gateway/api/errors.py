"""Errors as the client's API has them; the request's path says which API that is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol

from fastapi.exceptions import RequestValidationError
from starlette.responses import JSONResponse
from starlette.types import Scope

from gateway.api.anthropic_errors import AnthropicErrors
from gateway.api.openai_errors import OpenAIErrors
from gateway.errors import Fault, GatewayError


class ErrorShape(Protocol):
    """How an API words its errors."""

    def status(self, fault: Fault) -> int:
        """The HTTP status."""

    def body(self, error: GatewayError) -> dict[str, Any]:
        """The response's body."""


def error_shape(scope: Scope) -> ErrorShape:
    """That of the API whose path was asked for; OpenAI's for paths of none."""
    path = scope["path"].removeprefix("/v1")
    if path == "/messages" or path.startswith("/messages/"):
        return AnthropicErrors(scope["state"]["request_id"])
    return OpenAIErrors(_PROMPTS.get(path, "messages"))


_PROMPTS = {"/completions": "prompt", "/responses": "input"}


def error_response(error: GatewayError, scope: Scope) -> JSONResponse:
    """The response that refuses a request."""
    shape = error_shape(scope)
    headers = {}
    if error.retry_after_s is not None:
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after_s)))
    return JSONResponse(shape.body(error), shape.status(error.fault), headers)


def validation_error(error: RequestValidationError) -> GatewayError:
    """A body of the wrong shape; the field's path as ``messages[0].content``."""
    problems = error.errors()
    if problems[0]["type"] == "json_invalid":
        return GatewayError(Fault.INVALID, f"the body is no valid JSON: {problems[0]['ctx']['error']}")
    # Of a union every alternative complains; the one that came furthest is the one that was meant.
    first = _path(problems[0]["loc"])
    same_field = [problem for problem in problems if _path(problem["loc"]).startswith(first)]
    problem = max(same_field, key=lambda problem: len(_path(problem["loc"])))
    path = _path(problem["loc"])
    message = problem["msg"].removeprefix("Value error, ")
    return GatewayError(Fault.INVALID, f"{path}: {message}" if path else message, param=path or None)


def _path(location: Sequence[int | str]) -> str:
    path = ""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part != "body" and not _names_a_variant(part):
            path += f".{part}" if path else part
    return path


def _names_a_variant(part: str) -> bool:
    """Pydantic names the alternative of a union it tried, such as ``list[TextPart]``; no field has such a
    name.
    """
    return not part.replace("_", "").isalnum() or part in ("str", "bool", "int", "float") or part[0].isupper()
