"""Compiles kernels for a GPU that is not there, as they are launched, and says what they would take of it."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

_TYPES = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.int32: "*i32",
    torch.int16: "*i16",
    torch.uint8: "*u8",
    torch.int64: "*i64",
}


@dataclass(frozen=True)
class Compiled:
    """One kernel as compiled: bytes of shared memory a block, registers a thread, bytes spilled."""

    name: str
    constants: dict[str, Any]
    shared: int
    registers: int
    spilled: int


@contextmanager
def compiling(capability: int) -> Iterator[list[Compiled]]:
    """Within it a launch compiles for ``cuda:<capability>`` instead of running; tensors may be on "meta"."""
    compiled: list[Compiled] = []
    seen: set[Any] = set()
    run = JITFunction.run

    def compile_only(
        self: JITFunction[Any], *args: Any, grid: Any, warmup: bool = False, **options: Any
    ) -> None:
        names = [param.name for param in self.params]
        values = dict(zip(names, args, strict=False)) | {k: v for k, v in options.items() if k in names}
        options = {k: v for k, v in options.items() if k not in names}
        signature, constants, attributes = {}, {}, {}
        for at, param in enumerate(self.params):
            value = values[param.name]
            if param.is_constexpr or value is None:
                signature[param.name], constants[param.name] = "constexpr", value
            elif isinstance(value, torch.Tensor):
                signature[param.name] = _TYPES[value.dtype]
                attributes[(at,)] = [["tt.divisibility", 16]]
            elif isinstance(value, float):
                signature[param.name] = "fp32"
            else:
                signature[param.name] = "i32"
                if value % 16 == 0:
                    attributes[(at,)] = [["tt.divisibility", 16]]
        key = (self.__name__, tuple(signature.items()), tuple(constants.items()), tuple(attributes))
        if key in seen:
            return
        seen.add(key)
        source = ASTSource(self, signature=signature, constexprs=constants, attrs=attributes)
        kernel = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
        compiled.append(_measure(self.__name__, constants, kernel))

    JITFunction.run = compile_only  # type: ignore[method-assign]
    try:
        yield compiled
    finally:
        JITFunction.run = run  # type: ignore[method-assign]


def _measure(name: str, constants: dict[str, Any], kernel: Any) -> Compiled:
    from triton.knobs import nvidia

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(kernel.asm["cubin"])
        said = subprocess.run(
            [nvidia.cuobjdump.path, "--dump-resource-usage", file.name],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    registers = int(re.search(r"REG:(\d+)", said)[1])  # type: ignore[index]
    spilled = int(re.search(r"LOCAL:(\d+)", said)[1])  # type: ignore[index]
    stack = int(re.search(r"STACK:(\d+)", said)[1])  # type: ignore[index]
    return Compiled(name, constants, kernel.metadata.shared, registers, max(spilled, stack))
