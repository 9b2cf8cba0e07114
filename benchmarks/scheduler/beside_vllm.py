"""Do the simulator and the emulator schedule as vLLM does? Step by step, on random histories.

`python benchmarks/scheduler/beside_vllm.py [--count N] [--seed S]`: a history is an engine and what
is sent to it. Compared in each iteration: when it begins, its requests, their tokens, free blocks,
who was preempted. A history counts up to its first difference. Exit status 1: there is one.
"""

import argparse
import itertools
import random
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from pair_steps import PairHistory, SimulatedPair, VllmPair
from step_by_step import EmulatedSteps, History, SimulatedSteps, Step, VllmSteps

Side = SimulatedSteps | EmulatedSteps | SimulatedPair


@dataclass
class Found:
    """What a number of histories gave."""

    histories: int = 0
    steps: int = 0
    """That are equal."""
    preemptions: int = 0
    """In these."""
    different: list[int] = field(default_factory=list)
    """Seeds of the histories that are not equal."""


def draw(seed: int) -> History:
    """A history in which blocks, requests or tokens of an iteration may be scarce."""
    draw = random.Random(seed)
    size, count = draw.choice([1, 4, 16]), draw.randint(5, 40)
    longest = draw.choice([4, 12, 40]) * size
    prompts = [draw.randint(1, longest) for _ in range(count)]
    outputs = [draw.randint(1, draw.choice([3, 60])) for _ in range(count)]
    least = max(-(-(p + o - 1) // size) for p, o in zip(prompts, outputs, strict=True))
    gap_ms, now = draw.choice([0.0, 0.5, 4.0, 20.0]), 0
    arrivals = []
    for number in range(count):
        now += int(draw.expovariate(1 / gap_ms)) if gap_ms else 0
        # No two at the same part of an iteration, so that none arrives when one ends.
        arrivals.append(now + (number + 1) / 1_024)
    has_caches, repeats = draw.choice([(False, False), (True, False), (True, True), (True, True)])
    return History(
        size,
        least + draw.choice([0, 1, 3, 10, 100]) * draw.randint(1, 8),
        draw.choice([1, 2, 4, 8, 64]),
        draw.choice([8, 32, 128, 1_024]),
        0,
        has_caches,
        repeats,
        draw.random() < 0.5,
        tuple(arrivals),
        tuple(prompts),
        tuple(outputs),
        tuple(_draw_texts(draw, [prompt // size for prompt in prompts], repeats)),
    )


def _draw_texts(draw: random.Random, lengths: Iterable[int], repeats: bool) -> Iterator[str]:
    """Prompts of so many blocks; if it `repeats`, some begin like earlier ones."""
    texts = [""]
    for number, full in enumerate(lengths):
        if not repeats:
            yield chr(2_000 + number) * full
            continue
        text = draw.choice(texts)[: draw.randint(0, full)]
        text += "".join(draw.choice("ab") for _ in range(full - len(text)))
        texts.append(text)
        yield text


def draw_pair(seed: int, is_async: bool) -> PairHistory:
    """A history through a prefill and a decode instance whose iterations seldom end at once."""
    draw_more = random.Random(f"pair {seed}")
    history = replace(draw(seed), is_async=is_async, step_ms=_draw_ms(draw_more, 0.6, 1.7))
    least = max(-(-prompt // history.block_size) for prompt in history.prompts)
    prefill = replace(
        history,
        num_blocks=least + draw_more.choice([0, 1, 3, 10, 100]) * draw_more.randint(1, 8),
        max_num_seqs=draw_more.choice([1, 2, 4, 8, 64]),
        step_ms=1.0,
    )
    pull_ms = draw_more.choice([0, 1, 4]) + _draw_ms(draw_more, 0.05, 0.95)
    return PairHistory(prefill, history, pull_ms, _draw_ms(draw_more, 0.001, 0.05))


def _draw_ms(draw: random.Random, low: float, high: float) -> float:
    """A time of which many add up without rounding, so that what ends at once does so exactly."""
    return round(draw.uniform(low, high) * (1 << 20)) / (1 << 20)


def draw_for(side: Side, seed: int) -> History | PairHistory:
    """A history for one of our schedulers. The emulator's does not schedule ahead, and caches what
    an iteration computes when it ends: so no prompts begin alike; but their chunks may be limited.
    """
    if isinstance(side, SimulatedPair):
        return draw_pair(seed, side.is_async)
    history = draw(seed)
    if isinstance(side, SimulatedSteps):
        return history
    threshold = random.Random(seed).choice([0, 3, 20])
    return replace(
        history,
        is_async=False,
        long_prefill_token_threshold=threshold,
        repeats=False,
        texts=tuple(_draw_texts(random.Random(), map(len, history.texts), False)),
    )


def compare(count: int, seed: int, steps: Side, vllm: VllmSteps | VllmPair) -> Found:
    """Histories `seed` to `seed + count - 1` on both sides."""
    found = Found()
    for number in range(seed, seed + count):
        history = draw_for(steps, number)
        found.histories += 1
        for ours, theirs in run_both(history, steps, vllm):
            same = count_same(ours, theirs)
            found.steps += same
            found.preemptions += sum(len(step.preempted) for step in ours[:same])
            if same < max(len(ours), len(theirs)) and number not in found.different:
                found.different.append(number)
    return found


def run_both(history: Any, steps: Any, vllm: Any) -> list[tuple[list[Step], list[Step]]]:
    """Our steps and vLLM's, by instance."""
    ours, theirs = steps.run(history), vllm.run(history)
    if not isinstance(history, PairHistory):
        return [(list(ours), list(theirs))]
    return list(zip(ours, theirs, strict=True))


def count_same(ours: list[Step], theirs: list[Step]) -> int:
    """Steps before the first difference."""
    pairs = zip(ours, theirs, strict=False)
    return len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)))


def main() -> int:
    """Compare, print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--count", type=int, default=1_000, help="histories")
    parser.add_argument("--seed", type=int, default=0, help="of the first one")
    parser.add_argument("--show", action="store_true", help="its steps around the first difference")
    arguments = parser.parse_args()
    one, is_equal = VllmSteps(), True
    sides: tuple[tuple[str, Side, Any], ...] = (
        ("simulator", SimulatedSteps(), one),
        ("emulator", EmulatedSteps(), one),
        ("simulator, prefill and decode", SimulatedPair(), pair := VllmPair()),
        ("simulator, prefill and decode that schedule ahead", SimulatedPair(is_async=True), pair),
    )
    for name, steps, vllm in sides:
        if arguments.show:
            show(name, arguments.seed, steps, vllm)
            continue
        found = compare(arguments.count, arguments.seed, steps, vllm)
        equal = found.histories - len(found.different)
        print(f"{name}: {equal} of {found.histories} histories equal; until the first difference")
        print(f"  {found.steps} iterations and {found.preemptions} preemptions")
        if found.different:
            print(f"  the others: --seed {', '.join(map(str, found.different[:10]))}")
            is_equal = False
    return int(not is_equal)


def show(name: str, seed: int, steps: Side, vllm: Any) -> None:
    """Print both sides around the first difference."""
    history = draw_for(steps, seed)
    print(history)
    for ours, theirs in run_both(history, steps, vllm):
        same = count_same(ours, theirs)
        for at in range(max(same - 3, 0), same + 2):
            for side, each in ((name, ours), ("vLLM", theirs)):
                print(at, side, *each[at : at + 1])


if __name__ == "__main__":
    sys.exit(main())
