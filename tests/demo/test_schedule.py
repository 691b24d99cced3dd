"""The phases come in their order and never go back."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from demo.schedule import LONG, MIDDLE, SHORT, TOKENS_A_STEP, phase

DONE = st.floats(0, 1)
STEP = st.integers(0, 10**5)


@given(st.tuples(DONE, DONE).map(sorted), STEP)
def test_what_is_switched_on_stays_on(done: list[float], step: int) -> None:
    earlier, later = (phase(part, step, 10**6) for part in done)
    for name in ("select", "rounding", "quantized"):
        assert getattr(earlier, name) <= getattr(later, name)
    assert later.rate <= earlier.rate
    assert earlier.select >= earlier.rounding >= earlier.quantized, "each needs the one before"


@given(DONE, STEP)
def test_every_step_has_as_many_tokens(done: float, step: int) -> None:
    shape = phase(done, step, 0).shape
    assert shape.rows * shape.length == TOKENS_A_STEP
    assert shape in (SHORT, MIDDLE, LONG)


def test_it_ends_as_the_model_is_served_at_a_small_rate_after_a_warm_start() -> None:
    last = phase(1.0, 5000, 5000)
    assert (last.select, last.rounding, last.quantized, last.balance) == (True, True, True, 0.0)
    assert 0 < last.rate < 0.05
    assert 0 < phase(0.2, 900, 0).rate < phase(0.2, 900, 50).rate < phase(0.2, 900, 500).rate == 1.0
