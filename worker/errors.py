"""The errors a worker raises on purpose, each with a message for the user and a hint at what to do."""

from __future__ import annotations


class TwinsparkError(Exception):
    """Base of every error that is somebody's to act on.

    ``message`` says what is wrong, naming the file, key, tensor or number; ``hint`` says what to do. ``args``
    are the constructor's, so that an error survives being sent between processes.
    """

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message, hint)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message} ({self.hint})" if self.hint else self.message


class ModelFileError(TwinsparkError):
    """The model file cannot be served; its owner must get another one."""


class MemoryPlanError(TwinsparkError):
    """The box has no room for what was asked; its owner must ask for less or free memory."""


class RequestError(TwinsparkError):
    """The request is wrong; its sender must change it."""


class PromptTooLongError(RequestError):
    """The prompt does not fit the context."""

    def __init__(self, prompt_tokens: int, context_tokens: int) -> None:
        super().__init__(
            f"Prompt has {prompt_tokens} tokens, but the configured context size is {context_tokens} tokens",
            "shorten the prompt, or serve with a larger --ctx",
        )
        self.args = (prompt_tokens, context_tokens)
        self.prompt_tokens = prompt_tokens
        self.context_tokens = context_tokens


class BusyError(TwinsparkError):
    """No room in the queue; the sender may try again after ``retry_after_s``."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message, f"retry after {retry_after_s:g} s")
        self.args = (message, retry_after_s)
        self.retry_after_s = retry_after_s


class DrainingError(TwinsparkError):
    """The engine takes no new requests; the sender may try another one."""
