"""Step planning and admission are pure: no engine, no model."""

from __future__ import annotations

from collections.abc import Sequence

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


def bank(
    index: int, tokens: list[int], *, in_use: bool = False, used_at: float = 0.0, points: tuple[int, ...] = ()
) -> Bank:
    slots = {point: slot for slot, point in enumerate(points)}
    return Bank(BankId(index), ids(tokens), [], slots, in_use=in_use, used_at=used_at)


def ids(tokens: Sequence[int]) -> list[TokenId]:
    return [TokenId(token) for token in tokens]


def choice(prompt: Sequence[int], banks: list[Bank], **flags: bool) -> tuple[AdmissionKind, int, int, int]:
    admission = choose(ids(prompt), banks, now=100.0, **flags)
    assert admission is not None
    return admission.kind, admission.bank.id, admission.cached, admission.undo


def test_the_bank_with_the_longest_usable_beginning_is_taken() -> None:
    banks = [bank(0, [1, 2]), bank(1, [1, 2, 3, 4]), bank(2, [1, 2, 3, 4, 5], in_use=True), bank(3, [])]
    assert choice((1, 2, 3, 4, 5, 6), banks) == (AdmissionKind.WARM, 1, 4, 0)


def test_a_few_tokens_too_many_are_taken_back_and_no_more() -> None:
    prompt = (1, 2, 3, 9)
    assert choice(prompt, [bank(0, [1, 2, 3] + [7] * UNDO_ROWS)]) == (AdmissionKind.WARM, 0, 3, UNDO_ROWS)
    assert choice(prompt, [bank(0, [1, 2, 3] + [7] * (UNDO_ROWS + 1))]) == (AdmissionKind.COLD, 0, 0, 0)


def test_the_last_prompt_token_is_always_computed() -> None:
    assert choice((1, 2, 3), [bank(0, [1, 2, 3])]) == (AdmissionKind.WARM, 0, 2, 1)


def test_a_cold_prompt_takes_an_empty_bank_then_the_longest_unused() -> None:
    used = [bank(0, [5], used_at=3.0), bank(1, [6], used_at=1.0)]
    assert choice((1, 2), used)[1] == 1
    assert choice((1, 2), [*used, bank(2, [])])[1] == 2


def test_a_long_conversation_is_not_given_up_for_a_short_one_just_because_it_is_older() -> None:
    banks = [bank(0, [5] * 50_000, used_at=0.0), bank(1, [6] * 40, used_at=90.0)]
    assert choice((1, 2, 3), banks)[1] == 1


def test_a_rewritten_end_goes_back_to_the_last_point_before_it() -> None:
    history = list(range(1, 400))
    held = bank(0, history, points=(128, 256, 384))
    prompt = [*history[:300], *range(5000, 5010)]
    assert choice(prompt, [held]) == (AdmissionKind.TRUNCATE, 0, 256, 0)
    assert choice(prompt, [held], truncate=False) == (AdmissionKind.COLD, 0, 0, 0)


def test_a_conversation_in_use_or_worth_keeping_is_forked() -> None:
    history = list(range(1, 400))
    prompt = [*history[:300], 5000]
    free = bank(1, [])
    in_use = choice(prompt, [bank(0, history, points=(128, 256), in_use=True), free])
    kept = choice(prompt, [bank(0, history, points=(128, 256)), free])
    assert in_use == kept == (AdmissionKind.FORK, 1, 256, 0)
    assert (
        choice(prompt, [bank(0, history, points=(128, 256)), free], fork=False)[0] is AdmissionKind.TRUNCATE
    )


def test_no_bank_is_had_while_all_are_in_use() -> None:
    assert choose(ids((1, 2)), [bank(0, [], in_use=True)], now=0.0) is None


@given(st.lists(st.integers(0, 2), max_size=12), st.lists(st.integers(0, 2), min_size=1, max_size=12))
def test_the_common_beginning_is_found(held: list[int], prompt: list[int]) -> None:
    admission = choose(ids(prompt), [bank(0, held)], now=0.0)
    assert admission is not None
    common = 0
    while common < min(len(held), len(prompt) - 1) and held[common] == prompt[common]:
        common += 1
    assert admission.cached == (common if len(held) - common <= UNDO_ROWS else 0)
