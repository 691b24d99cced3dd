"""How much to think, in the words of all APIs."""

from __future__ import annotations

from gateway.chat.conversation import Effort
from gateway.errors import Fault, GatewayError

_EFFORTS = {
    "none": Effort.NONE,
    "minimal": Effort.HIGH,
    "low": Effort.HIGH,
    "medium": Effort.HIGH,
    "high": Effort.HIGH,
    "xhigh": Effort.HIGH,
    "max": Effort.MAX,
}
_OF_MODEL = {"deepseek-chat": Effort.NONE, "deepseek-reasoner": Effort.HIGH}
_MAX_EFFORT_CONTEXT = 393216
"""Think Max is meant for contexts from here on; in shorter ones it is served as high."""


def effort_named(name: str, param: str) -> Effort:
    """The effort a client names.

    Raises:
        GatewayError: there is no such effort; ``param`` is to blame.
    """
    if name not in _EFFORTS:
        allowed = ", ".join(_EFFORTS)
        raise GatewayError(Fault.INVALID, f"{param}: {name!r} is none of {allowed}", param=param)
    return _EFFORTS[name]


def effort_of_model(model: str) -> Effort | None:
    """What the name of one of DeepSeek's hosted models says about thinking."""
    return _OF_MODEL.get(model)


def fitting(effort: Effort, context_tokens: int) -> Effort:
    """The effort as it is served in a context of this size."""
    too_short = effort is Effort.MAX and context_tokens < _MAX_EFFORT_CONTEXT
    return Effort.HIGH if too_short else effort
