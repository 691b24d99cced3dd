"""Errors keep what they say when they are sent between processes."""

from __future__ import annotations

import pickle

import pytest

from worker import errors


@pytest.mark.parametrize(
    "error",
    [
        errors.ModelFileError("a", "b"),
        errors.MemoryPlanError("a"),
        errors.RequestError("a", "b"),
        errors.PromptTooLongError(200, 100),
        errors.BusyError("a", 2.5),
        errors.DrainingError("a", "b"),
    ],
)
def test_an_error_survives_pickling(error: errors.TwinsparkError) -> None:
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert vars(copy) == vars(error)
    assert str(copy) == str(error)
