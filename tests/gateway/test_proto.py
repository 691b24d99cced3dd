"""The committed stubs are those that the protocol gives."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_generated_stubs_are_current(tmp_path: Path) -> None:
    protos = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "gateway/proto").glob("*.proto"))
    outputs = [f"--{kind}_out={tmp_path}" for kind in ("python", "pyi", "grpc_python")]
    subprocess.run(
        [sys.executable, "-m", "grpc_tools.protoc", "-I.", *outputs, *protos], cwd=ROOT, check=True
    )
    generated = sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*.py*"))
    assert len(generated) == 3 * len(protos)
    for path in generated:
        assert (ROOT / path).read_bytes() == (tmp_path / path).read_bytes(), f"{path}: run `make proto`"
