"""``twinspark chat``: a conversation in the terminal."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer
from rich.console import Console

from cluster.config import ConfigError, doc, load_config
from cluster.record import read_record

_HELP = "/new starts over, /think turns thinking on or off, /quit ends; Ctrl-C interrupts an answer."
_CONNECT_S = 10.0


def command(
    url: Annotated[
        str | None, typer.Option(help="Service to talk to; the one running here when unset.")
    ] = None,
    think: Annotated[bool, typer.Option("--think/--no-think", help="Let the model think first.")] = True,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Longest answer in tokens.")] = None,
    state: Annotated[Path | None, typer.Option(help=doc("state"))] = None,
) -> None:
    """Talks to the running service; answers stream, with their speed."""
    if url is None:
        record = read_record(load_config(state=state).state)
        if record is None:
            raise ConfigError("no service is running", "start one with `twinspark serve`, or give its --url")
        url = record.url
    console = Console()
    console.print(_HELP, style="dim")
    beginning = [{"role": "system", "content": system}] if system else []
    messages: list[dict[str, str]] = list(beginning)
    while True:
        try:
            text = console.input("[bold]> [/]").strip()
        except (EOFError, KeyboardInterrupt):
            console.print()
            return
        if text == "/quit":
            return
        if text == "/new":
            messages = list(beginning)
            console.print("A new conversation.", style="dim")
        elif text == "/think":
            think = not think
            console.print(f"Thinking is {'on' if think else 'off'}.", style="dim")
        elif text.startswith("/"):
            console.print(_HELP, style="dim")
        elif text:
            messages.append({"role": "user", "content": text})
            answer = _answer(console, url, messages, think=think, max_tokens=max_tokens)
            if answer is None:
                messages.pop()
            else:
                messages.append({"role": "assistant", "content": answer})


def _answer(
    console: Console, url: str, messages: list[dict[str, str]], *, think: bool, max_tokens: int | None
) -> str | None:
    """Streams one answer to the terminal; None when there is none to go on from."""
    body: dict[str, Any] = {
        "messages": messages,
        "stream": True,
        "stream_options": {"include_usage": True},
        "thinking": think,
    }
    if max_tokens is not None:
        body["max_tokens"] = max_tokens
    content: list[str] = []
    try:
        for chunk in _chunks(url, body):
            for choice in chunk["choices"]:
                delta = choice["delta"]
                if delta.get("reasoning_content"):
                    console.print(
                        delta["reasoning_content"], end="", style="dim", markup=False, highlight=False
                    )
                if delta.get("content"):
                    if not content:
                        console.print()
                    content.append(delta["content"])
                    console.print(delta["content"], end="", markup=False, highlight=False)
            if "usage" in chunk:
                _numbers(console, chunk)
    except KeyboardInterrupt:
        console.print("\ninterrupted", style="dim")
    except httpx.HTTPError as error:
        console.print(f"\nthe service at {url} does not answer: {error}", style="red", markup=False)
        return None
    except _RefusedError as error:
        console.print(f"\n{error}", style="red", markup=False)
        return None
    return "".join(content)


def _numbers(console: Console, chunk: dict[str, Any]) -> None:
    usage, timings = chunk["usage"], chunk["timings"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    console.print(
        f"\n{usage['completion_tokens']} tokens at {timings['decode_tokens_per_s']} tok/s; prompt "
        f"{usage['prompt_tokens']} ({cached} cached), first token after {timings['ttft_s']:.2f} s",
        style="dim",
        highlight=False,
    )


class _RefusedError(Exception):
    """The service answered with an error."""


def _chunks(url: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    timeout = httpx.Timeout(None, connect=_CONNECT_S)
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=timeout) as response:
        if response.status_code != 200:
            response.read()
            try:
                raise _RefusedError(response.json()["error"]["message"])
            except (ValueError, KeyError, TypeError):
                raise _RefusedError(f"HTTP {response.status_code}") from None
        for line in response.iter_lines():
            data = line.removeprefix("data: ")
            if data == line or data == "[DONE]":
                continue
            chunk = json.loads(data)
            if "error" in chunk:
                raise _RefusedError(chunk["error"]["message"])
            yield chunk
