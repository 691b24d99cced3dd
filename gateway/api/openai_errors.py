"""Errors in OpenAI's shape."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gateway.api import sse
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


@dataclass(frozen=True)
class OpenAIErrors:
    """``{"error": {...}}``.

    Attributes:
        prompt: the field that holds the prompt, to blame when it is too long.
    """

    prompt: str = "messages"

    def status(self, fault: Fault) -> int:
        """The HTTP status."""
        return _STATUS[fault][0]

    def body(self, error: GatewayError) -> dict[str, Any]:
        """The response's body."""
        _, kind, code = _STATUS[error.fault]
        param = self.prompt if error.fault is Fault.CONTEXT_LENGTH else error.param
        body = {"message": error.message, "type": kind, "param": param, "code": error.code or code}
        return {"error": {**body, **error.numbers}}

    def event(self, error: GatewayError) -> bytes:
        """The event that ends a stream whose headers are out already."""
        return sse.event(self.body(error), "error")
