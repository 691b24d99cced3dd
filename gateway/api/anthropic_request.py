"""The bodies of Anthropic's requests, and what they mean for the conversation."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import Field, StrictBool, StrictInt, StrictStr

from gateway.api.anthropic_blocks import InputMessage, TextBlock, system_text
from gateway.api.efforts import effort_named, effort_of_model, fitting
from gateway.api.fields import Body, FunctionName, Text
from gateway.api.sampling import SamplingFields
from gateway.api.tool_rules import Words, check_calls, check_names, must_call, must_call_named
from gateway.chat.conversation import ChatRequest, Effort, Message, Role, Tool, ToolChoice
from gateway.errors import Fault, GatewayError

_WORDS = Words("tool_use block", "tool_result blocks")


class Thinking(Body):
    """``thinking``."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[StrictInt, Field(ge=1)] | None = None


class OutputConfig(Body):
    """``output_config``."""

    effort: StrictStr | None = None
    format: Any = None


class ToolDefinition(Body):
    """One of ``tools``; those without a schema of their own run on Anthropic's servers or are known to its
    models alone.
    """

    name: FunctionName
    type: StrictStr | None = None
    description: Text | None = None
    input_schema: dict[str, Any] | None = None
    strict: StrictBool | None = None

    def tool(self, path: str) -> Tool:
        """The tool as the conversation has it.

        Raises:
            GatewayError: it is not the client's own.
        """
        if self.type not in (None, "custom"):
            raise GatewayError(
                Fault.INVALID,
                f"{path}.type: {self.type!r} is not served; offer a tool of your own, with an input_schema",
                param=f"{path}.type",
            )
        if self.input_schema is None:
            where = f"{path}.input_schema"
            raise GatewayError(Fault.INVALID, f"{where}: Field required", param=where)
        return Tool(self.name, self.description or "", self.input_schema, bool(self.strict))


class Choice(Body):
    """``tool_choice``."""

    type: Literal["auto", "any", "tool", "none"]
    name: StrictStr = ""
    disable_parallel_tool_use: StrictBool | None = None


class CountTokensRequest(SamplingFields):
    """The body of ``POST /v1/messages/count_tokens``."""

    messages: Annotated[list[InputMessage], Field(min_length=1)]
    model: StrictStr = ""
    system: Text | list[TextBlock] | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: Any = None
    tools: list[ToolDefinition] | None = None
    tool_choice: Choice | None = None
    mcp_servers: list[Any] | None = None

    def chat_request(self, vocabulary_size: int, context_tokens: int) -> ChatRequest:
        """The request in the gateway's terms.

        Raises:
            GatewayError: something is asked for that is not served; it is never silently left out.
        """
        self._refuse_unserved()
        tools = tuple(one.tool(f"tools[{at}]") for at, one in enumerate(self.tools or ()))
        check_names(tools, [f"tools[{at}].name" for at in range(len(tools))])
        return ChatRequest(
            self._messages(),
            fitting(self._effort(), context_tokens),
            self.sampling(vocabulary_size),
            tools=tools,
            tool_choice=self._tool_choice(tools),
            parallel_tool_calls=not (self.tool_choice and self.tool_choice.disable_parallel_tool_use),
            thinking_tokens=(self.thinking and self.thinking.budget_tokens) or 0,
        )

    def _refuse_unserved(self) -> None:
        wanted = {
            "mcp_servers": bool(self.mcp_servers),
            "output_format": self.output_format is not None,
            "output_config.format": self.output_config is not None and self.output_config.format is not None,
        }
        for param, is_wanted in wanted.items():
            if is_wanted:
                raise GatewayError(
                    Fault.INVALID, f"{param}: not served by this version; leave it out", param=param
                )

    def _messages(self) -> tuple[Message, ...]:
        placed = [
            one for at, message in enumerate(self.messages) for one in message.placed(f"messages[{at}]")
        ]
        messages = tuple(message for message, _ in placed)
        check_calls(messages, [path for _, path in placed], _WORDS)
        system = system_text(self.system)
        return (Message(Role.SYSTEM, system), *messages) if system else messages

    def _effort(self) -> Effort:
        """This API's models think only when told to; how much is another field."""
        named = self.output_config.effort if self.output_config else None
        effort = effort_named(named, "output_config.effort") if named is not None else Effort.HIGH
        if self.thinking is not None:
            return effort if self.thinking.type != "disabled" else Effort.NONE
        return effort if effort_of_model(self.model) is Effort.HIGH else Effort.NONE

    def _tool_choice(self, tools: tuple[Tool, ...]) -> ToolChoice:
        choice = self.tool_choice
        if choice is not None and choice.type == "any":
            return must_call(tools)
        if choice is not None and choice.type == "tool":
            return must_call_named(choice.name, tools, "tool_choice.name")
        return ToolChoice("none" if choice is not None and choice.type == "none" else "auto")


class MessagesRequest(CountTokensRequest):
    """The body of ``POST /v1/messages``."""

    max_tokens: Annotated[StrictInt, Field(ge=1)]
    stop_sequences: list[Text] | None = None
    stream: StrictBool = False

    def chat_request(self, vocabulary_size: int, context_tokens: int) -> ChatRequest:
        """As for counting, with what matters to the answer alone."""
        wanted = super().chat_request(vocabulary_size, context_tokens)
        sampling = self.sampling(vocabulary_size, max_tokens=self.max_tokens)
        return replace(wanted, sampling=sampling, stops=tuple(self.stop_sequences or ()))
