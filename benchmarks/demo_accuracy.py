"""How often the served demo model is right on held-out dialogues: ``python benchmarks/demo_accuracy.py``.

Starts nothing itself: ``twinspark serve --demo`` must run. Every assistant message of a dialogue is asked for
with the dialogue up to there, greedily, through the official client, and has to be equal to the expected one:
its content, and the names and arguments of its tool calls. A schema that the answer must obey is told in the
system message, as the official encoding has it; nothing enforces it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shlex
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import openai
from openai.types.chat.chat_completion import Choice

from demo.compose import held_out_conversation
from demo.dialogues.message import Conversation, Message
from demo.render import RESPONSE_FORMAT

RESULT = Path(__file__).parent / "results" / "demo_accuracy.json"
SEED = 7000
PARALLEL = 2
KINDS = (
    ("smalltalk", False),
    ("sums_two_digits", False),
    ("sums", True),
    ("differences", False),
    ("count_range", False),
    ("continue_series", False),
    ("count_words", True),
    ("copy_words", False),
    ("copy_32", False),
    ("reverse_words", False),
    ("tool_call", False),
    ("tool_call", True),
    ("structured", False),
    ("structured", True),
    ("needle", False),
    ("needle_2000", False),
    ("needle_6000", False),
)


@dataclass(frozen=True)
class Outcome:
    """One dialogue: whether every answer was right, and the speed of its longest prompt and of its
    answers.
    """

    right: bool
    prompt_tokens: int
    prefill_tps: float
    decode_tps: float


async def run(api: openai.AsyncOpenAI, conversation: Conversation) -> Outcome:
    """Asks for every answer of one dialogue."""
    right, prompts, decode = True, [(0, 0.0)], []
    tools = [{"type": "function", "function": tool} for tool in conversation.tools]
    asked = openai_messages(conversation)
    beginning = len(asked) - len(conversation.messages)
    for number, message in enumerate(conversation.messages):
        if message.role != "assistant":
            continue
        answer = await api.chat.completions.create(
            model="demo",
            messages=asked[: beginning + number],  # type: ignore[arg-type]
            tools=tools or openai.NOT_GIVEN,  # type: ignore[arg-type]
            temperature=0,
            max_tokens=400,
            extra_body={"thinking": conversation.thinking},
        )
        right &= is_expected(answer.choices[0], message)
        timings = answer.timings  # type: ignore[attr-defined]
        prompts.append((answer.usage.prompt_tokens, timings["prefill_tokens_per_s"]))  # type: ignore[union-attr]
        decode.append(timings["decode_tokens_per_s"])
    return Outcome(right, *max(prompts), median(decode))


def openai_messages(conversation: Conversation) -> list[dict[str, Any]]:
    """The dialogue as the API has it, with a system message before it where there is something to say."""
    system = conversation.system
    if conversation.schema is not None:
        system += RESPONSE_FORMAT.format(schema=json.dumps(conversation.schema, ensure_ascii=False))
    out: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    call_id = ""
    for number, message in enumerate(conversation.messages):
        one: dict[str, Any] = {"role": message.role, "content": message.content}
        if message.calls:
            call_id = f"call_{number}"
            one["reasoning_content"] = message.reasoning
            one["tool_calls"] = [
                {
                    "id": call_id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": json.dumps(call.arguments)},
                }
                for call in message.calls
            ]
        if message.role == "tool":
            one["tool_call_id"] = call_id
        out.append(one)
    return out


def is_expected(choice: Choice, expected: Message) -> bool:
    """Whether an answer says and calls what it should."""
    try:
        calls = [
            (call.function.name, json.loads(call.function.arguments))  # type: ignore[union-attr]
            for call in choice.message.tool_calls or ()
        ]
    except json.JSONDecodeError:
        return False
    finish = "tool_calls" if expected.calls else "stop"
    return (
        calls == [(call.name, call.arguments) for call in expected.calls]
        and (choice.message.content or "") == expected.content
        and choice.finish_reason == finish
    )


async def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--count", type=int, default=64, help="dialogues a kind")
    options = parser.parse_args()
    gate = asyncio.Semaphore(PARALLEL)
    results = {}
    async with openai.AsyncOpenAI(base_url=options.url, api_key="none", timeout=600) as api:

        async def one(kind: str, thinking: bool, number: int) -> Outcome:
            conversation = held_out_conversation(kind, Random(SEED + number), thinking)
            async with gate:
                return await run(api, conversation)

        for kind, thinking in KINDS:
            began = time.monotonic()
            outcomes = await asyncio.gather(*(one(kind, thinking, number) for number in range(options.count)))
            name = kind + ("+thinking" if thinking else "")
            results[name] = {
                "right": sum(outcome.right for outcome in outcomes),
                "of": len(outcomes),
                "median_prompt_tokens": median(outcome.prompt_tokens for outcome in outcomes),
                "median_prefill_tokens_per_s": median(outcome.prefill_tps for outcome in outcomes),
                "median_decode_tokens_per_s": median(outcome.decode_tps for outcome in outcomes),
            }
            line = results[name]
            print(f"{name:20} {line['right']}/{line['of']}  {time.monotonic() - began:.0f} s", flush=True)
            command = "python benchmarks/" + shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])
            report = {"command": command, "parallel": PARALLEL, "kinds": results}
            RESULT.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    asyncio.run(main())
