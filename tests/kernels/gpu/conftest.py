"""Where the Triton kernels run: on a GPU, or on the CPU in a process started with TRITON_INTERPRET=1."""

from __future__ import annotations

import pytest
import torch
import triton


@pytest.fixture(scope="session")
def device() -> torch.device:
    """The device of the kernels under test."""
    if torch.cuda.is_available():
        return torch.device("cuda")
    if triton.knobs.runtime.interpret:
        return torch.device("cpu")
    pytest.skip("needs a GPU, or TRITON_INTERPRET=1")
