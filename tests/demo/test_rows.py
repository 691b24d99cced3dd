"""Packed rows: whole conversations, each at a multiple of 128, each predicting its own next tokens."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest
import torch

from demo.layout import ALIGNMENT, visibility
from demo.render import ASSISTANT, BOS, EOS, THOUGHT
from demo.rows import ANSWER, CONTEXT, PADDING, Rows, Shape, answer_kinds, to_batch
from demo.vocabulary import load

SHAPES = (Shape(2, 1024, 0.0), Shape(1, 2048, 1.0))


def batches(shape: Shape, seed: int, count: int) -> list[tuple[np.ndarray, ...]]:
    return list(islice(iter(Rows(shape, seed)), count))


@pytest.mark.parametrize("shape", SHAPES)
def test_a_document_is_one_conversation_at_a_window_s_start(shape: Shape) -> None:
    begin = load().token_to_id(BOS)
    for ids, positions, documents, targets, kinds in batches(shape, 1, 3):
        for row in range(shape.rows):
            numbers = [number for number in np.unique(documents[row]) if number >= 0]
            assert numbers == list(range(len(numbers)))
            for number in numbers:
                (where,) = np.nonzero(documents[row] == number)
                assert where[0] % ALIGNMENT == 0
                assert len(where) % ALIGNMENT == 0
                assert np.array_equal(positions[row, where], np.arange(len(where)))
                own = ids[row, where]
                assert own[0] == begin
                assert (own == begin).sum() == 1 + (own[1:] == 0).sum(), "padding has the same id"
                predicted = kinds[row, where] != PADDING
                following = np.append(own[1:], 0)
                assert np.array_equal(targets[row, where][predicted], following[predicted])


def test_the_same_seed_gives_the_same_rows() -> None:
    one, again, other = (batches(SHAPES[0], seed, 2) for seed in (5, 5, 6))
    for ours, theirs in zip(one, again, strict=True):
        assert all(np.array_equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert any(not np.array_equal(a, b) for a, b in zip(one[0], other[0], strict=True))


def test_answers_are_what_follows_the_assistant_s_tag_up_to_the_end_of_the_turn() -> None:
    text = f"{BOS}hello{ASSISTANT}{THOUGHT}good day{EOS}"
    ids = load().encode(text, add_special_tokens=False).ids
    kinds = answer_kinds(ids)
    thought = ids.index(load().token_to_id(THOUGHT))
    answer = [index for index, kind in enumerate(kinds) if kind == ANSWER]
    assert answer == list(range(thought, len(ids) - 1))
    assert ids[answer[-1] + 1] == load().token_to_id(EOS)
    assert kinds[-1] == PADDING
    assert set(kinds[:thought]) == {CONTEXT}


def test_weights_follow_the_kinds_and_padding_weighs_nothing() -> None:
    columns = tuple(torch.from_numpy(column) for column in batches(SHAPES[0], 2, 1)[0])
    batch = to_batch(columns, torch.device("cpu"), 0.25)
    for kind, weight in ((ANSWER, 1.0), (CONTEXT, 0.25), (PADDING, 0.0)):
        found = batch.weights[columns[4] == kind]
        assert len(found)
        assert bool((found == weight).all())


def test_a_token_sees_itself_and_nothing_later_or_elsewhere() -> None:
    columns = tuple(torch.from_numpy(column) for column in batches(SHAPES[0], 3, 1)[0])
    batch = to_batch(columns, torch.device("cpu"), 0.1)
    visible = visibility(batch, 128, {4, 128})
    rows, length = batch.ids.shape
    documents = batch.documents.flatten()
    index = torch.arange(rows * length)
    own = index % ALIGNMENT + ALIGNMENT
    assert bool(visible.raw[index, own].all())
    query, key = visible.raw.nonzero().unbind(1)
    seen = query // ALIGNMENT * ALIGNMENT - ALIGNMENT + key
    assert bool(((seen <= query) & (query - seen < 128)).all())
    assert torch.equal(documents[seen], documents[query])
    for ratio, mask in visible.windows.items():
        query, entry = mask.nonzero().unbind(1)
        last = query // length * length + entry * ratio + ratio - 1
        assert bool((last <= query).all())
        assert torch.equal(documents[last], documents[query])
