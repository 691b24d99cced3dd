"""Errors in OpenAI's shape."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

from fastapi.exceptions import RequestValidationError
from starlette.responses import JSONResponse

from gateway.errors import Fault, GatewayError

_STATUS = {
    Fault.INVALID: (400, "invalid_request_error", None),
    Fault.CONTEXT_LENGTH: (400, "invalid_request_error", "context_length_exceeded"),
    Fault.NOT_FOUND: (404, "invalid_request_error", "not_found"),
    Fault.TOO_LARGE: (413, "invalid_request_error", "request_too_large"),
    Fault.BUSY: (429, "rate_limit_error", "busy"),
    Fault.UNAVAILABLE: (503, "service_unavailable_error", "unavailable"),
    Fault.INTERNAL: (500, "server_error", "internal_error"),
}


def error_body(error: GatewayError) -> dict[str, Any]:
    """``{"error": {...}}``."""
    _, kind, code = _STATUS[error.fault]
    body = {"message": error.message, "type": kind, "param": error.param, "code": code, **error.numbers}
    return {"error": body}


def error_response(error: GatewayError) -> JSONResponse:
    """The response that refuses a request."""
    headers = {}
    if error.retry_after_s is not None:
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after_s)))
    return JSONResponse(error_body(error), _STATUS[error.fault][0], headers)


def error_event(error: GatewayError) -> bytes:
    """The event that ends a stream whose headers are out already."""
    return b"event: error\ndata: " + json.dumps(error_body(error), ensure_ascii=False).encode() + b"\n\n"


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
