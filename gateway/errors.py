"""What goes wrong with a request, before any API has given it its own shape."""

from __future__ import annotations

from enum import Enum


class Fault(Enum):
    """Who must act: each API maps these to its own status and type."""

    INVALID = "invalid"
    CONTEXT_LENGTH = "context_length"
    NOT_FOUND = "not_found"
    TOO_LARGE = "too_large"
    BUSY = "busy"
    UNAVAILABLE = "unavailable"
    INTERNAL = "internal"


class GatewayError(Exception):
    """A request that cannot be served.

    Attributes:
        message: for the client, with what to do.
        param: the field's path in the request's body, where one is to blame.
        code: a finer code than the fault's own, for APIs that have codes.
        retry_after_s: when it is worth trying again.
        numbers: further fields for the client, e.g. prompt and context sizes.
    """

    def __init__(
        self,
        fault: Fault,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
        numbers: dict[str, int] | None = None,
    ) -> None:
        super().__init__(message)
        self.fault = fault
        self.message = message
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s
        self.numbers = numbers or {}
