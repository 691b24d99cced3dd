"""What the drafter saves: ``python -m demo.drafter.evaluate FILE.gguf [--share F] [--result FILE.json]``.

Greedy decoding of held-out dialogues, speculated: a step of the model verifies a block's drafts, and says the
accepted ones and one token of its own. As speculation never changes what is said, the answers are made first,
then drafts at all their positions at once, and the steps are walked through afterwards.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from demo.drafter.base import SHIPPED, Base, load_base
from demo.drafter.infer import Block, Drafter
from demo.drafter.speak import Example, Said, examples_of, say
from demo.evaluate import KINDS, Kind

_SEED = 4321
_TOKENS_A_BATCH = 32768
_BLOCKS_AT_ONCE = 2048
_BINS = 10


@dataclass
class Tally:
    """Counts over the steps walked through.

    ``offered[k]`` counts steps in which the answer has a token at draft k's place, ``reached[k]`` those whose
    drafts before it were right, ``accepted[k]`` those whose draft k was right too. ``doubts`` are the
    confidences of the reached drafts, and whether they were right.
    """

    block: int
    dialogues: int = 0
    steps: int = 0
    tokens: int = 0
    cut: int = 0
    offered: list[int] = field(default_factory=list)
    reached: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    doubts: list[tuple[float, bool]] = field(default_factory=list)

    def __post_init__(self) -> None:
        for counts in (self.offered, self.reached, self.accepted):
            counts += [0] * (self.block - len(counts))

    @property
    def emitted(self) -> float:
        """Tokens a step, the model's own included."""
        return self.tokens / self.steps if self.steps else 0.0

    def walk(self, said: list[int], tokens: list[list[int]], confidence: list[list[float]]) -> None:
        """Goes through one answer.

        Args:
            said: the answer's tokens; the first comes from the prompt's own step.
            tokens: of the block at each of them but the last.
            confidence: of these drafts.
        """
        self.dialogues += 1
        at, last = 0, len(said) - 1
        while at < last:
            right = 0
            for row in range(min(self.block, last - at)):
                self.offered[row] += 1
                if right < row:
                    continue
                self.reached[row] += 1
                is_right = tokens[at][row] == said[at + 1 + row]
                self.accepted[row] += is_right
                self.doubts.append((confidence[at][row], is_right))
                right += is_right
            emitted = min(right + 1, last - at)
            self.steps += 1
            self.tokens += emitted
            at += emitted

    def add(self, other: Tally) -> None:
        """Counts the other's steps too."""
        for name in ("dialogues", "steps", "tokens", "cut"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name in ("offered", "reached", "accepted"):
            pairs = zip(getattr(self, name), getattr(other, name), strict=True)
            setattr(self, name, [one + more for one, more in pairs])
        self.doubts += other.doubts

    def report(self) -> dict[str, object]:
        """As JSON values."""
        return {
            "answers": self.dialogues,
            "steps": self.steps,
            "tokens": self.tokens,
            "tokens_a_step": round(self.emitted, 3),
            "answers_cut": self.cut,
            "acceptance": _rates(self.accepted, self.offered),
            "acceptance_if_reached": _rates(self.accepted, self.reached),
        }


def calibration(doubts: list[tuple[float, bool]]) -> dict[str, object]:
    """The confidences against what was accepted, in bins of equal width, and the mean gap between the two."""
    found = torch.tensor(doubts, dtype=torch.float64).view(-1, 2)
    bins, gap = [], 0.0
    for number in range(_BINS):
        held = found[(found[:, 0] * _BINS).floor().clamp(max=_BINS - 1) == number]
        if len(held):
            stated, accepted = held.mean(0).tolist()
            gap += abs(stated - accepted) * len(held) / len(found)
            bins.append({"drafts": len(held), "stated": round(stated, 3), "accepted": round(accepted, 3)})
    return {"expected_error": round(gap, 4), "bins": bins}


def measure(drafter: Drafter, said: Said, tally: Tally) -> None:
    """Walks through every answer."""
    tally.cut += said.cut
    starts = [range(span.start, span.stop - 1) for span in said.spans]
    row = torch.tensor([number for number, span in enumerate(starts) for _ in span], dtype=torch.int64)
    column = torch.tensor([at for span in starts for at in span], dtype=torch.int64)
    block = _drafts(drafter, said, row, column)
    tokens, confidence, begin = block.tokens.tolist(), block.confidence.tolist(), 0
    for number, span in enumerate(said.spans):
        if not len(span):
            continue
        end = begin + len(span) - 1
        answer = said.ids[number, span.start : span.stop].tolist()
        tally.walk(answer, tokens[begin:end], confidence[begin:end])
        begin = end


def evaluate(drafter: Drafter, base: Base, kind: Kind, share: float) -> Tally:
    """The tally of a kind's dialogues, or of a share of them."""
    tally = Tally(drafter.config.block)
    examples = examples_of(kind.name, kind.thinking, max(1, round(kind.count * share)), _SEED)
    for part in _batches(examples):
        measure(drafter, say(base, part, drafter.config.target_layers), tally)
    return tally


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path, help="a drafter's GGUF file")
    parser.add_argument("--base", type=Path, default=SHIPPED, help="the model it drafts for")
    parser.add_argument("--share", type=float, default=1.0, help="of the held-out dialogues")
    parser.add_argument("--result", type=Path, help="where to write the figures")
    arguments = parser.parse_args()
    began = time.monotonic()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    base = load_base(arguments.base, torch.float32, device)
    drafter = Drafter.load(arguments.file, base)
    total = Tally(drafter.config.block)
    by_kind: dict[str, object] = {}
    # Every kind has rows of another length, for which compiling would take longer than running.
    with torch.compiler.set_stance("force_eager"):
        for kind in KINDS:
            found = evaluate(drafter, base, kind, arguments.share)
            total.add(found)
            by_kind[kind.label] = found.report()
            print(f"{kind.label:24} {found.emitted:.3f} tokens a step, {found.steps} steps", flush=True)
    sureness = calibration(total.doubts)
    figures = {
        "measure": "greedy decoding of held-out dialogues, drafts from the exported file, all verified",
        "share": arguments.share,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "seconds": round(time.monotonic() - began, 1),
        "all": total.report(),
        "confidence": sureness,
        "kinds": by_kind,
    }
    if arguments.result:
        arguments.result.write_text(json.dumps(figures, indent=1) + "\n")
    print(f"{'all':24} {total.emitted:.3f} tokens a step, {total.steps} steps, {total.cut} answers cut")
    print(f"acceptance by position {_rates(total.accepted, total.offered)}")
    print(f"if reached {_rates(total.accepted, total.reached)}")
    print(f"confidence is off by {sureness['expected_error']} on average; {figures['seconds']} s")


def _drafts(drafter: Drafter, said: Said, row: Tensor, column: Tensor) -> Block:
    """Blocks at all the positions, on the CPU."""
    device, (rows, length) = said.taps.device, said.ids.shape
    window, block = drafter.model.window, drafter.config.block
    positions = torch.arange(length, device=device)
    context = drafter.context(said.taps.flatten(0, 1), positions.repeat(rows))
    back = torch.arange(-window, 0, device=device)
    tokens, confidence = [torch.zeros(0, block, dtype=torch.int64)], [torch.zeros(0, block)]
    ids = said.ids.to(device)
    places = torch.stack((row, column)).to(device)
    for r, c in places.split(_BLOCKS_AT_ONCE, 1):
        before = c[:, None] + back
        index = r[:, None] * length + before.clamp(min=0)
        found = drafter.draft(ids[r, c], c, context, index, before >= 0)
        tokens.append(found.tokens.cpu())
        confidence.append(found.confidence.cpu())
    return Block(torch.cat(tokens), torch.cat(confidence))


def _batches(examples: list[Example]) -> Iterator[list[Example]]:
    """Runs of examples that fit into a batch, those of similar length together."""
    ordered = sorted(examples, key=lambda one: len(one.prompt) + len(one.answer))
    begin = 0
    while begin < len(ordered):
        end = begin + 1
        while end < len(ordered) and (end + 1 - begin) * _size(ordered[end]) <= _TOKENS_A_BATCH:
            end += 1
        yield ordered[begin:end]
        begin = end


def _size(example: Example) -> int:
    return len(example.prompt) + len(example.answer) + 144


def _rates(counts: list[int], of: list[int]) -> list[float]:
    return [round(count / total, 4) if total else 0.0 for count, total in zip(counts, of, strict=True)]


if __name__ == "__main__":
    main()
