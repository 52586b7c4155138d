"""What is run: llama-bench's vocabulary. ``pp128`` prefills 128 tokens, ``tg32`` decodes 32, and
``@ d512`` means that 512 tokens were in the context before the clock started."""

from __future__ import annotations

import dataclasses
import itertools
import random
import re
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from edgeqkv.errors import UsageError

_NUMBER = r"(\d{1,10})"  # 10 digits hold all that fits 31 bits
_RANGE = re.compile(f"{_NUMBER}(?:-{_NUMBER}(?:([+*]){_NUMBER})?)?")
MOST = 2**31 - 1
MOST_VALUES = 1000  # of one flag
MOST_RUNS = 100_000  # a day and more of them, at a second each


@dataclasses.dataclass(frozen=True)
class Workload:
    """One process of a configuration, in llama-bench's field names. repetitions: in this process,
    after ``warmup`` runs that do not count. process: which of the configuration's processes, from 0.
    seed: of the token ids and of the order in which the sweep ran; order: the place in it."""

    n_prompt: int
    n_gen: int
    n_depth: int
    n_threads: int
    repetitions: int
    warmup: int
    seed: int
    order: int
    process: int = 0

    @property
    def label(self) -> str:
        """``pp128``, ``tg32``, ``tg32 @ d512``."""
        parts = [f"pp{self.n_prompt}"] * bool(self.n_prompt) + [f"tg{self.n_gen}"] * bool(
            self.n_gen
        )
        return "+".join(parts) + (f" @ d{self.n_depth}" if self.n_depth else "")

    @property
    def sizes(self) -> tuple[int, ...]:
        """What is asked for: --resume does not run the same again."""
        asked = (self.n_prompt, self.n_gen, self.n_depth, self.n_threads)
        return (*asked, self.repetitions, self.process)

    @property
    def n_tokens(self) -> int:
        """Context that the workload needs in all."""
        return self.n_depth + self.n_prompt + self.n_gen

    def misfit(self, capacity: int) -> str | None:
        """Why it does not run in a context of ``capacity`` tokens; None when it fits."""
        if self.n_tokens <= capacity:
            return None
        return (
            f"{self.label} needs a context of {self.n_tokens} tokens, the bundle holds "
            f"{capacity}; shorten it or export with a larger --max-context"
        )

    def ids(self, used_tokens: int) -> NDArray[np.int64]:
        """Random token ids [n_tokens] below ``used_tokens``: depth, then prompt, then generated."""
        return np.random.default_rng(self.seed).integers(
            0, used_tokens, self.n_tokens, dtype=np.int64
        )


def parse_counts(text: str, flag: str, *, low: int = 0) -> list[int]:
    """``1,2``, ``128-512+128`` or ``0-512*2`` as a list, in the order given, without repeats.

    A range is first-last+step or first-last*factor; without either the step is 1. A factor cannot
    leave 0, so ``0-512*2`` is 0, 1, 2, 4 ... 512. No more than MOST_VALUES are ever made.
    """
    counts: dict[int, None] = {}
    for part in text.split(","):
        match = _RANGE.fullmatch(part.strip())
        if match is None:
            raise UsageError(
                f"{flag} is {text!r}; allowed: numbers, comma lists, ranges like 128-512+128 or 64-512*2"
            )
        found = _range(*match.groups(), flag=flag)
        if bad := [c for c in (found[0], found[-1]) if not low <= c <= MOST]:
            raise UsageError(f"{flag} is {bad[0]}; it must be at least {low} and fit 31 bits")
        if len(counts) + len(found) > MOST_VALUES:
            raise UsageError(
                f"{flag} {text if len(text) < 50 else 'is a list that'} makes "
                f"{len(counts) + len(found)} values; allowed: {MOST_VALUES} at most; give fewer, or "
                "ranges with larger steps such as 128-4096+128"
            )
        counts.update(dict.fromkeys(found))
    return list(counts)


def parse_pair(text: str) -> tuple[int, int]:
    """``128,32`` -> prompt and generated length, both at least 1."""
    match = re.fullmatch(rf"\s*{_NUMBER}\s*,\s*{_NUMBER}\s*", text)
    if match is None or not int(match[1]) or not int(match[2]):
        raise UsageError(f"-pg is {text!r}; allowed: prompt,generated such as 128,32")
    return int(match[1]), int(match[2])


def _range(
    first: str, last: str | None, operator: str | None, by: str | None, *, flag: str
) -> Sequence[int]:
    start, stop, step = int(first), int(last or first), int(by or 1)
    if stop < start:
        raise UsageError(f"{flag} {first}-{last} runs backwards; give the smaller number first")
    if step < 1 or (operator == "*" and step < 2):
        raise UsageError(f"{flag} {first}-{last}{operator}{by} never ends; give +1 or *2 or more")
    if operator != "*":
        return range(start, stop + 1, step)
    counts = [0] if start == 0 else []
    value = start or 1
    while value <= stop:
        counts.append(value)
        value *= step
    return counts


def expand(
    prompts: Sequence[int],
    gens: Sequence[int],
    depths: Sequence[int],
    threads: Sequence[int],
    *,
    repetitions: int,
    seed: int,
    bundles: int = 1,
    processes: int = 1,
    pairs: Sequence[tuple[int, int]] = (),
) -> list[tuple[int, Workload]]:
    """(bundle index, workload) of the whole sweep, in an order drawn from ``seed``; 0 turns a test off.

    ``pairs``: (prompt, generated) lengths that run one after the other in one configuration.

    Random order keeps a machine that warms up, or a neighbour, from favouring one bundle. The
    ``processes`` of a configuration are a whole round of the sweep apart, so that what they differ
    by holds the drift of the machine too.
    """
    tests = [(p, 0) for p in prompts if p] + [(0, n) for n in gens if n] + list(pairs)
    if not tests:
        raise UsageError(
            "nothing to run: both -p and -n are 0, and there is no -pg; give one of the three"
        )
    runs = len(tests) * len(depths) * len(threads) * bundles * processes
    if runs > MOST_RUNS:
        raise UsageError(
            f"-p, -n, -d, -t and --processes ask for {runs} runs in all; allowed: {MOST_RUNS} at most"
        )
    one_round = list(itertools.product(range(bundles), tests, depths, threads))
    draw = random.Random(seed)
    plan: list[tuple[int, Workload]] = []
    for process in range(processes):
        for bundle, (p, n), depth, t in draw.sample(one_round, len(one_round)):
            workload = Workload(p, n, depth, t, repetitions, 1, seed, len(plan), process)
            plan.append((bundle, workload))
    return plan
