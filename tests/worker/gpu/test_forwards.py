"""Both GPU forwards against plain torch on the same file, and against each other.

The GPU rounds activations (to bytes while decoding, to float16 in prefill), plain torch does not, so logits
agree within what that rounding makes of them.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.gpu import error
from support.gpu_model import TINY, GpuRunner, reference, write_model

from worker.gguf.presets import SMALL

TOLERANCE = 0.05


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("tiny") / "tiny.gguf", TINY)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("small") / "small.gguf", SMALL)


def _tokens(count: int, vocab: int, seed: int) -> list[int]:
    return torch.randint(0, vocab, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.slow
def test_tiny_prefill_then_decode(device: torch.device, tiny: Path) -> None:
    runner = GpuRunner(tiny, device, banks=2, context=256, chunk=32)
    plain = reference(tiny, context=256, banks=2)
    tokens = _tokens(46, TINY.vocab, 1)
    for begin, end in ((0, 30), (30, 43)):
        expected = plain.step([(0, tokens[begin:end])])[0][-1]
        assert error(runner.chunk(0, tokens[begin:end]).cpu(), expected) < TOLERANCE
    for begin, end in ((43, 44), (44, 46)):
        expected = plain.step([(0, tokens[begin:end])])[0]
        (logits,) = runner.step([(0, tokens[begin:end])])
        assert error(logits.cpu(), expected) < TOLERANCE


@pytest.mark.gpu
@pytest.mark.parametrize("borders", [(700, 1400), (129, 400, 1023, 1400)])
def test_prefill(device: torch.device, small: Path, borders: tuple[int, ...]) -> None:
    runner = GpuRunner(small, device, context=2048, chunk=1024)
    plain = reference(small, context=2048)
    tokens = _tokens(borders[-1], SMALL.vocab, 2)
    begin = 0
    for end in borders:
        expected = plain.step([(1, tokens[begin:end])])[0][-1]
        assert error(runner.chunk(1, tokens[begin:end]).cpu(), expected) < TOLERANCE
        begin = end


@pytest.mark.gpu
def test_decode(device: torch.device, small: Path) -> None:
    runner = GpuRunner(small, device, context=2048, chunk=1024)
    plain = reference(small, context=2048)
    tokens = _tokens(700, SMALL.vocab, 3)
    runner.chunk(0, tokens[:600])
    plain.step([(0, tokens[:600])])
    errors = []
    for at in range(600, 700):
        expected = plain.step([(0, tokens[at : at + 1])])[0]
        (logits,) = runner.step([(0, tokens[at : at + 1])])
        errors.append(error(logits.cpu(), expected))
    assert sorted(errors)[50] < 0.02
    assert max(errors) < 0.2


@pytest.mark.gpu
def test_decode_rows_do_not_depend_on_each_other(device: torch.device, small: Path) -> None:
    prompts = [_tokens(count, SMALL.vocab, count) for count in (300, 511, 130)]
    more = [_tokens(4, SMALL.vocab, 90 + bank) for bank in range(3)]

    def run(together: bool) -> list[torch.Tensor]:
        runner = GpuRunner(small, device, context=1024, chunk=1024)
        for bank, prompt in enumerate(prompts):
            runner.chunk(bank, prompt)
        if together:
            return runner.step(list(enumerate(more)))
        alone = []
        for bank, tokens in enumerate(more):
            alone.append(torch.cat([runner.step([(bank, [token])])[0] for token in tokens]))
        return alone

    for one, other in zip(run(True), run(False), strict=True):
        assert torch.equal(one, other)


@pytest.mark.gpu
def test_prefill_does_not_depend_on_where_chunks_are_cut(device: torch.device, small: Path) -> None:
    tokens = _tokens(1400, SMALL.vocab, 5)
    results = []
    for cuts in ((1024, 1400), (128, 1152, 1400), (512, 640, 1400)):
        runner = GpuRunner(small, device, context=2048, chunk=1024)
        begin = 0
        for end in cuts:
            logits = runner.chunk(0, tokens[begin:end])
            begin = end
        results.append(logits)
    assert all(torch.equal(results[0], other) for other in results[1:])


@pytest.mark.gpu
def test_an_abandoned_chunk_leaves_its_bank_as_it_was(device: torch.device, small: Path) -> None:
    tokens = _tokens(700, SMALL.vocab, 6)
    results = []
    for disturbed in (False, True):
        runner = GpuRunner(small, device, context=2048, chunk=1024)
        runner.chunk(0, tokens[:500])
        if disturbed:
            for abandoned in (1, 5):
                work = runner.begin(0, _tokens(333, SMALL.vocab, 7))
                for _ in range(abandoned):
                    next(work)
                work.close()
        results.append(runner.chunk(0, tokens[500:]))
    assert torch.equal(*results)
