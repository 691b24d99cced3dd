"""Banks after any history: a prompt's next logits are those of a fresh start, bit for bit."""

from __future__ import annotations

import itertools
import random
import time
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.models import random_tensors, small_config
from support.runner import Runner
from torch import Tensor

from worker.bank.banks import Bank, TokenId
from worker.bank.restore import points_to_drop
from worker.model.forward import Model
from worker.model.weights import assemble
from worker.schedule.admission import Admission, carry_out, choose
from worker.schedule.request import AdmissionKind

CONTEXT = 600
CUTS = (1, 63, 126, 127, 128, 129, 130, 255, 256, 257, 383, 384, 385)


@pytest.fixture(scope="module")
def model() -> Model:
    config = replace(small_config(), layers=4, compress_ratios=(0, 4, 128, 4))
    return Model(config, assemble(config, random_tensors(config, 1).__getitem__))


class Histories:
    """Random use of a few banks, checked against fresh starts."""

    def __init__(self, model: Model, seed: int) -> None:
        self.chance = random.Random(seed)
        self.model = model
        self.runner = Runner(model, rounding=True, banks=3, context=CONTEXT, points=3)
        self.known: list[list[TokenId]] = [[]]
        self.busy: list[tuple[Bank, list[TokenId]]] = []
        self.kinds: set[AdmissionKind] = set()

    def tokens(self, count: int) -> list[TokenId]:
        return [TokenId(self.chance.randrange(2, self.model.config.vocab)) for _ in range(count)]

    def prompt(self) -> list[TokenId]:
        """Something like what has been before, up to a cut, and then something new."""
        old = self.chance.choice(self.known)
        cut = self.chance.choice([len(old), len(old) - 3, *CUTS, self.chance.randint(0, len(old))])
        beginning = old[: max(cut, 0)]
        return [*beginning, *self.tokens(self.chance.randint(1, min(150, CONTEXT - 20 - len(beginning))))]

    def admit(self, prompt: list[TokenId]) -> Admission | None:
        flags = {name: self.chance.random() < 0.8 for name in ("truncate", "fork")}
        admission = choose(prompt, self.runner.banks.all, time.monotonic(), **flags)
        if admission is None:
            return None
        carry_out(admission, self.runner.banks)
        bank = admission.bank
        assert bank.tokens == prompt[: admission.cached]
        bank.in_use = True
        bank.used_at = time.monotonic()
        self.kinds.add(admission.kind)
        self.busy.append((bank, prompt))
        return admission

    def advance(self) -> None:
        """One ragged step over some of the busy banks; whoever completes its prompt is checked and goes on or
        leaves.
        """
        chosen = self.chance.sample(self.busy, self.chance.randint(1, len(self.busy)))
        work = []
        for bank, prompt in chosen:
            size = self.chance.choice([1, 2, 40, 128 - bank.length % 128, 200])
            work.append((bank.id, prompt[bank.length : bank.length + size]))
        for (bank, prompt), logits in zip(chosen, self.runner.step(work), strict=True):
            if bank.length == len(prompt):
                assert torch.equal(logits[-1], fresh(self.model, prompt)), f"bank {bank.id} at {bank.length}"
                self.known.append(list(prompt))
                if self.chance.random() < 0.5 and len(prompt) < CONTEXT - 20:
                    prompt += self.tokens(self.chance.randint(1, 9))
                else:
                    self.leave(bank)

    def leave(self, bank: Bank) -> None:
        """The request ends or is cancelled; the bank keeps what it has."""
        bank.in_use = False
        self.busy = [one for one in self.busy if one[0] is not bank]


def fresh(model: Model, prompt: list[TokenId]) -> Tensor:
    return Runner(model, rounding=True, banks=1, context=CONTEXT, points=0).step([(0, prompt)])[0][-1]


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(seed=st.integers(0, 2**32))
def test_any_history_ends_in_the_state_of_a_fresh_start(model: Model, seed: int) -> None:
    run_history(model, seed, rounds=25)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_long_histories_end_in_the_state_of_a_fresh_start(model: Model, seed: int) -> None:
    run_history(model, seed, rounds=150)


def test_a_history_uses_every_kind_of_admission(model: Model) -> None:
    assert run_history(model, seed=3, rounds=60).kinds == set(AdmissionKind)


def run_history(model: Model, seed: int, rounds: int) -> Histories:
    print(f"seed {seed}")
    histories = Histories(model, seed)
    for _ in range(rounds):
        if histories.chance.random() < 0.6:
            histories.admit(histories.prompt())
        if histories.busy and histories.chance.random() < 0.15:
            histories.leave(histories.chance.choice(histories.busy)[0])
        if histories.busy:
            histories.advance()
        histories.runner.banks.check()
    return histories


def test_a_fork_leaves_its_source_as_it_is_while_both_go_on(model: Model) -> None:
    runner = Runner(model, rounding=True, banks=2, context=CONTEXT)
    histories = Histories(model, 0)
    shared, first, second = histories.tokens(300), histories.tokens(40), histories.tokens(50)
    runner.step([(0, shared)])  # one step, so the only restore point is made in the next
    runner.step([(0, first[:84])])
    source, copy = runner.banks.all
    runner.step([(0, histories.tokens(384 - source.length))])
    tail = list(source.tokens[300:])
    runner.banks.fork(source, copy, 384)
    one, two = runner.step([(0, first), (1, second)])
    assert torch.equal(one[-1], fresh(model, [*shared, *tail, *first]))
    assert torch.equal(two[-1], fresh(model, [*shared, *tail, *second]))
    runner.banks.check()
    assert set(source.pages[:3]) == set(copy.pages[:3])
    assert source.pages[3] != copy.pages[3]


def test_single_tokens_are_not_taken_back_past_a_restored_point(model: Model) -> None:
    runner = Runner(model, rounding=True, banks=1, context=CONTEXT)
    histories = Histories(model, 0)
    runner.step([(0, histories.tokens(256))])
    runner.step([(0, histories.tokens(40))])
    bank = runner.banks.all[0]
    runner.banks.truncate(bank, 256)
    runner.step([(0, histories.tokens(2))])
    with pytest.raises(ValueError, match="cannot take back 3"):
        runner.banks.undo(bank, 3)
    prompt = [*bank.tokens[:253], *histories.tokens(5)]
    admission = choose(prompt, runner.banks.all, time.monotonic())
    assert admission is not None
    assert admission.kind is AdmissionKind.COLD


@given(st.sets(st.integers(1, 4000), max_size=40), st.integers(1, 16))
def test_the_newest_points_are_kept_and_old_ones_thinned(positions: set[int], keep: int) -> None:
    points = sorted(position * 128 for position in positions)
    dropped = points_to_drop(points, keep)
    left = [point for point in points if point not in dropped]
    assert len(left) == min(keep, len(points))
    assert not points or points[-1] in left


def test_points_thin_out_with_age() -> None:
    left: list[int] = []
    for position in range(128, 128 * 400, 128):
        left.append(position)
        left = [point for point in left if point not in points_to_drop(left, 8)]
    gaps = [after - before for before, after in itertools.pairwise(left)]
    assert gaps[-1] <= 256
    assert gaps[0] > 8 * gaps[-1]
    assert all(later <= 2 * earlier for earlier, later in itertools.pairwise(gaps))
