"""Step planning and admission are pure: no engine, no model."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from worker.bank.banks import Bank, BankId, TokenId
from worker.bank.store import UNDO_ROWS
from worker.schedule.admission import choose
from worker.schedule.request import AdmissionKind, RequestId
from worker.schedule.step import MAX_DECODE_ROWS, Work, plan_step

works = st.lists(
    st.builds(
        Work,
        request=st.uuids().map(lambda value: RequestId(str(value))),
        position=st.integers(0, 400),
        prompt=st.integers(1, 400),
        served_step=st.integers(-1, 50),
    ),
    max_size=40,
)


@given(works, st.integers(1, 128))
def test_every_decoding_sequence_runs_and_at_most_one_prompt(work: list[Work], chunk: int) -> None:
    plan = plan_step(work, chunk)
    by_id = {one.request: one for one in work}
    decoding = [one for one in work if one.decodes]
    assert len(plan.decode) == min(len(decoding), MAX_DECODE_ROWS)
    assert all(by_id[request].decodes for request in plan.decode)
    assert (plan.prefill is None) == (len(decoding) == len(work))
    if plan.prefill is not None:
        one = by_id[plan.prefill]
        end = one.position + plan.prefill_tokens
        assert plan.prefill_tokens >= 1
        assert end == one.prompt or end % chunk == 0
        assert end // chunk <= one.position // chunk + 1
        assert one.served_step == min(other.served_step for other in work if not other.decodes)


def test_prompts_advance_in_turn_so_a_short_one_is_not_held_up() -> None:
    work = {name: Work(RequestId(name), 0, prompt, -1) for name, prompt in (("long", 1000), ("short", 30))}
    for step in range(2):
        plan = plan_step(list(work.values()), 100)
        assert plan.prefill is not None
        old = work[plan.prefill]
        work[plan.prefill] = Work(old.request, old.position + plan.prefill_tokens, old.prompt, step)
    assert work["short"].decodes


def bank(index: int, tokens: list[int], *, in_use: bool = False, used_at: float = 0.0) -> Bank:
    return Bank(BankId(index), [TokenId(token) for token in tokens], [], in_use, used_at)


def test_the_bank_with_the_longest_usable_beginning_is_taken() -> None:
    banks = [bank(0, [1, 2]), bank(1, [1, 2, 3, 4]), bank(2, [1, 2, 3, 4, 5], in_use=True), bank(3, [])]
    admission = choose([TokenId(t) for t in (1, 2, 3, 4, 5, 6)], banks)
    assert admission is not None
    assert (admission.kind, admission.bank.id, admission.cached, admission.undo) == (
        AdmissionKind.WARM,
        1,
        4,
        0,
    )


def test_a_few_tokens_too_many_are_taken_back_and_no_more() -> None:
    prompt = [TokenId(t) for t in (1, 2, 3, 9)]
    near = choose(prompt, [bank(0, [1, 2, 3] + [7] * UNDO_ROWS)])
    far = choose(prompt, [bank(0, [1, 2, 3] + [7] * (UNDO_ROWS + 1))])
    assert near is not None
    assert far is not None
    assert (near.kind, near.cached, near.undo) == (AdmissionKind.WARM, 3, UNDO_ROWS)
    assert (far.kind, far.cached) == (AdmissionKind.COLD, 0)


def test_the_last_prompt_token_is_always_computed() -> None:
    admission = choose([TokenId(t) for t in (1, 2, 3)], [bank(0, [1, 2, 3])])
    assert admission is not None
    assert (admission.cached, admission.undo) == (2, 1)


def test_a_cold_prompt_takes_an_empty_bank_then_the_longest_unused() -> None:
    used = [bank(0, [5], used_at=3.0), bank(1, [6], used_at=1.0)]
    prompt = [TokenId(1), TokenId(2)]
    for banks, expected in ((used, 1), ([*used, bank(2, [])], 2)):
        admission = choose(prompt, banks)
        assert admission is not None
        assert admission.bank.id == expected


def test_no_bank_is_had_while_all_are_in_use() -> None:
    assert choose([TokenId(1), TokenId(2)], [bank(0, [], in_use=True)]) is None
