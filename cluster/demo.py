"""The embedded demo model."""

from __future__ import annotations

import os
from pathlib import Path

from worker.gguf.presets import DEMO
from worker.gguf.synthetic import write_synthetic

_SEED = 4
_NAME = "twinspark-demo-random-v1.gguf"


def demo_model() -> Path:
    """A small model of random weights, written to the user's cache on first use; its text is noise."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    path = Path(base) / "twinspark" / _NAME
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_synthetic(path, DEMO, "q2", _SEED)
    return path
