"""Which rows of a block are trained on, and what a block may see."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from support.drafting import text
from torch import Tensor

from demo.drafter.blocks import blocks_at, starts
from demo.drafter.outputs import Outputs

BLOCK, WINDOW = 5, 8


def outputs_of(answer: list[bool], own: list[bool]) -> Outputs:
    """A text of two documents in which the model says or does not say what stands there."""
    batch = text([128, 128], 1)
    where = torch.zeros(256, dtype=torch.bool)
    where[100 : 100 + len(answer)] = torch.tensor(answer)
    choices = batch.targets.flatten().clone()
    for index, is_own in enumerate(own):
        choices[100 + index] += not is_own
    nothing = torch.zeros(256, 0)
    return Outputs(batch, nothing, nothing, choices, where)


flags = st.lists(st.booleans(), min_size=40, max_size=40)


@given(flags, flags)
def test_rows_count_while_the_text_is_the_model_s_own(answer: list[bool], own: list[bool]) -> None:
    outputs = outputs_of(answer, own)
    said = {100 + index + 1 for index, is_answer in enumerate(answer) if is_answer}
    anchors = starts(outputs)
    assert set(anchors.tolist()) == {at for at in said if at + 1 in said}
    blocks = blocks_at(outputs, anchors, BLOCK, WINDOW)
    choices, ids = outputs.choices.tolist(), outputs.batch.ids.flatten().tolist()
    for number, anchor in enumerate(anchors.tolist()):
        for row in range(BLOCK):
            # Serving comes to this row once the tokens after the anchor were drafted and accepted.
            between = range(anchor + 1, anchor + row + 1)
            reached = all(at in said and choices[at - 1] == ids[at] for at in between)
            counts = reached and anchor + row + 1 in said
            assert bool(blocks.weights[number, row] > 0) == counts
            if counts:
                assert blocks.before[number, row] == ids[anchor + row]
                assert blocks.wanted[number, row] == choices[anchor + row]


def test_later_rows_count_less() -> None:
    outputs = outputs_of([True] * 20, [True] * 20)
    weights = blocks_at(outputs, torch.tensor([102]), BLOCK, WINDOW).weights[0]
    ratio = weights[1:] / weights[:-1]
    torch.testing.assert_close(ratio, torch.full((BLOCK - 1,), torch.e**-0.25))


def test_the_context_is_the_window_before_the_anchor_within_its_document() -> None:
    outputs = outputs_of([], [])
    for anchor in (0, 3, 127, 128, 130, 200):
        blocks = blocks_at(outputs, torch.tensor([anchor]), BLOCK, WINDOW)
        begin = 0 if anchor < 128 else 128
        seen: Tensor = blocks.context[0][blocks.visible[0]]
        assert seen.tolist() == list(range(max(begin, anchor - WINDOW), anchor))
