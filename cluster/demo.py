"""The embedded demo model."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from cluster.config import ConfigError

_NAME = "twinspark-demo.gguf"


def demo_model() -> Path:
    """The model file that is installed with the package.

    Raises:
        ConfigError: the installation lacks it.
    """
    path = Path(str(files("demo") / _NAME))
    if not path.is_file():
        raise ConfigError(
            f"the demo model {path} is missing", "install twinspark again, or serve a file of your own"
        )
    return path
