"""Sampling fields that several APIs have, on top of the service's defaults."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, StrictInt

from gateway.api.fields import Body, Number, Text
from gateway.chat.conversation import Sampling
from gateway.errors import Fault, GatewayError


class SamplingFields(Body):
    """OpenAI's names, and those that other servers have added."""

    temperature: Annotated[Number, Field(ge=0, le=100)] | None = None
    top_p: Annotated[Number, Field(gt=0, le=1)] | None = None
    top_k: Annotated[StrictInt, Field(ge=-1)] | None = None
    min_p: Annotated[Number, Field(ge=0, le=1)] | None = None
    frequency_penalty: Annotated[Number, Field(ge=-2, le=2)] | None = None
    presence_penalty: Annotated[Number, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[Number, Field(ge=0.01, le=100)] | None = None
    logit_bias: dict[str, Annotated[Number, Field(ge=-100, le=100)]] | None = None
    seed: StrictInt | None = None

    def sampling(self, vocabulary_size: int, **more: Any) -> Sampling:
        """The client's wishes; what it leaves out, or is None in ``more``, has the service's default.

        Raises:
            GatewayError: ``logit_bias`` names a token that does not exist.
        """
        given = {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": None if self.top_k is None else max(self.top_k, 0),
            "min_p": self.min_p,
            "frequency_penalty": self.frequency_penalty,
            "presence_penalty": self.presence_penalty,
            "repetition_penalty": self.repetition_penalty,
            "logit_bias": _bias(self.logit_bias, vocabulary_size),
            "seed": self.seed,
            **more,
        }
        return Sampling(**{name: value for name, value in given.items() if value is not None})


def stop_strings(stop: Text | list[Text] | None) -> tuple[str, ...]:
    """One stop string or several."""
    return (stop,) if isinstance(stop, str) else tuple(stop or ())


def _bias(given: dict[str, float] | None, vocabulary_size: int) -> dict[int, float] | None:
    if given is None:
        return None
    bias = {}
    for token, value in given.items():
        if not token.isascii() or not token.isdigit() or int(token) >= vocabulary_size:
            raise GatewayError(
                Fault.INVALID,
                f"logit_bias: {token!r} is no token id below {vocabulary_size}",
                param="logit_bias",
            )
        bias[int(token)] = value
    return bias
