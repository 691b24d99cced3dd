"""Types of fields in request bodies, whatever the API."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StrictStr

from gateway.chat.tokens import whole_characters

Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]


Text = Annotated[
    StrictStr, BeforeValidator(lambda value: whole_characters(value) if isinstance(value, str) else value)
]
FunctionName = Annotated[StrictStr, Field(pattern=r"^[^\s\"<>]+$", max_length=128)]
"""Longer and freer than OpenAI's, as many tools are named, but without what breaks a call's markup."""


class Body(BaseModel):
    """Fields nobody here knows are let pass: clients send many that change nothing."""

    model_config = ConfigDict(extra="ignore")
