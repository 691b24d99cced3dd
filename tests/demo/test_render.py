"""The training's renderer against digests of renderings made with the official encoder."""

from __future__ import annotations

from dataclasses import replace
from hashlib import sha256

import pytest

from demo.dialogues.message import Call, Conversation, Message
from demo.render import render

TOOL = {
    "name": "list_files",
    "description": "List files in a directory.",
    "parameters": {
        "type": "object",
        "properties": {"path": {"type": "string", "description": "Directory path to list."}},
        "required": ["path"],
    },
}
QUESTION = Message(
    "user", "List the files in the current directory. Use the provided tool; do not answer in prose."
)
PLAIN = Conversation((QUESTION,), tools=(TOOL,))
THINKING = replace(PLAIN, system="You are terse.", thinking=True)
CONTINUED = replace(
    THINKING,
    messages=(
        QUESTION,
        Message("assistant", "", "Need listing.", (Call("list_files", {"path": "."}),)),
        Message("tool", "a.txt\nb.txt"),
    ),
)


@pytest.mark.parametrize(
    ("conversation", "digest"),
    [
        (PLAIN, "100dd4283b1bb09780fd0bcd1461d98c16d83aba033c0bed55861775ac78868c"),
        (THINKING, "4080fbba6caf3de9e91819facc431b4a68f08dc958babeb0a588dd9193dedd97"),
        (CONTINUED, "ddbf808e323a84696037b3a3d2b6d101727d51399e48cf508add439f3f44b8d1"),
    ],
)
def test_official_renderings(conversation: Conversation, digest: str) -> None:
    assert sha256(render(conversation).encode()).hexdigest() == digest
