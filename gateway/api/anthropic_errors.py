"""Errors in Anthropic's shape."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gateway.api import sse
from gateway.errors import Fault, GatewayError

_STATUS = {
    Fault.INVALID: (400, "invalid_request_error"),
    Fault.CONTEXT_LENGTH: (400, "invalid_request_error"),
    Fault.NOT_FOUND: (404, "not_found_error"),
    Fault.TOO_LARGE: (413, "request_too_large"),
    Fault.BUSY: (429, "rate_limit_error"),
    Fault.UNAVAILABLE: (529, "overloaded_error"),
    Fault.INTERNAL: (500, "api_error"),
}


@dataclass(frozen=True)
class AnthropicErrors:
    """``{"type": "error", "error": {...}}``; a field's path is in the message, as ``messages.0.content``."""

    request_id: str

    def status(self, fault: Fault) -> int:
        """The HTTP status."""
        return _STATUS[fault][0]

    def body(self, error: GatewayError) -> dict[str, Any]:
        """The response's body."""
        body = {"type": _STATUS[error.fault][1], "message": _message(error)}
        return {"type": "error", "error": body, "request_id": self.request_id}

    def event(self, error: GatewayError) -> bytes:
        """The event that ends a stream whose headers are out already."""
        return sse.event(self.body(error), "error")


def _message(error: GatewayError) -> str:
    numbers = error.numbers
    if error.fault is Fault.CONTEXT_LENGTH and numbers:
        # Agents know these words, and shorten their history.
        return f"prompt is too long: {numbers['n_prompt_tokens']} tokens > {numbers['n_ctx']} maximum"
    if error.param and error.message.startswith(error.param):
        path = error.param.replace("[", ".").replace("]", "")
        return path + error.message.removeprefix(error.param)
    return error.message
