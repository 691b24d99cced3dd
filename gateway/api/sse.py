"""Server-sent events as bytes."""

from __future__ import annotations

import json
from typing import Any

from gateway.proto import engine_pb2 as pb

DONE = b"data: [DONE]\n\n"
"""Ends OpenAI's older streams."""


def event(data: dict[str, Any], name: str = "") -> bytes:
    """One event; its data is JSON on one line."""
    body = json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode()
    head = b"event: " + name.encode() + b"\n" if name else b""
    return head + b"data: " + body + b"\n\n"


def comment(text: str) -> bytes:
    """What clients skip; it keeps the connection alive."""
    return f": {text}\n\n".encode()


def progress_comment(progress: pb.PrefillProgress) -> bytes:
    """How far the prompt is."""
    where = f"queued {progress.queue_position}" if progress.queue_position else "prefill"
    return comment(f"{where} {progress.done_tokens}/{progress.prompt_tokens}")
