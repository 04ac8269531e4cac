# SPDX-License-Identifier: Apache-2.0
"""What a person sees: a line while it runs, a table at the end, a sentence for each difference."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from ddtree_vllm.smoke.prompts import PROMPTS, SEEDED_PROMPTS
from ddtree_vllm.smoke.server import Completion


@dataclass(frozen=True)
class Contestant:
    """One engine of the comparison, by the options that set it apart."""

    key: str
    title: str
    options: tuple[str, ...]


@dataclass
class Result:
    """What one contestant gave, and how long it took."""

    start_s: float = 0.0
    greedy_s: float = 0.0
    tokens_per_step: float = 1.0
    greedy: list[Completion] = field(default_factory=list)
    seeded: list[Completion] = field(default_factory=list)


class Progress:
    """One line per contestant: rewritten in place on a terminal, printed now and then elsewhere."""

    EVERY_S = 15.0

    def __init__(self, title: str) -> None:
        self.title = title
        self.live = sys.stdout.isatty()
        self.began = time.monotonic()
        self.last = ""
        self.printed_at = 0.0

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self.live:
            print()

    def say(self, what: str) -> None:
        """Tells what is going on now; called as often as one likes."""
        now = time.monotonic()
        line = f"[{now - self.began:4.0f} s] {self.title}: {what}"
        if self.live:
            print(f"\r\033[K{line}", end="", flush=True)
        elif what != self.last or now - self.printed_at > self.EVERY_S:
            print(line, flush=True)
            self.printed_at = now
        self.last = what


def table(contestants: Sequence[Contestant], results: dict[str, Result]) -> str:
    """One row per engine; the first, without speculation, is what the others are held to."""
    rows = [("engine", "ready", "greedy part", "tokens/step", "greedy", "seeded")]
    for contestant in contestants:
        result = results[contestant.key]
        if contestant.key == "ar":
            verdicts = ("reference", "reference")
        else:
            key = contestant.key
            verdicts = (_verdict(results, key, "greedy"), _verdict(results, key, "seeded"))
        rows.append(
            (
                contestant.title,
                f"{result.start_s:.0f} s",
                f"{result.greedy_s:.1f} s",
                f"{result.tokens_per_step:.2f}",
                *verdicts,
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    ]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(line.rstrip() for line in lines)


def _verdict(results: dict[str, Result], key: str, part: str) -> str:
    same = getattr(results[key], part) == getattr(results["ar"], part)
    return "identical" if same else "DIFFERS"


def identical(results: dict[str, Result], part: str) -> bool:
    """Whether every engine gave the same token ids and text; `part` is "greedy" or "seeded"."""
    return all(_verdict(results, key, part) == "identical" for key in results)


def complaints(contestants: Sequence[Contestant], results: dict[str, Result]) -> list[str]:
    """What is wrong with the results, a sentence each."""
    found = []
    for contestant in contestants:
        for part, prompts in (("greedy", PROMPTS), ("seeded", SEEDED_PROMPTS)):
            expected, got = getattr(results["ar"], part), getattr(results[contestant.key], part)
            for prompt, a, b in zip(prompts, expected, got, strict=True):
                if a != b:
                    found.append(_difference(contestant.title, part, prompt, a, b))
    chain, tree = results["chain"].tokens_per_step, results["ddtree"].tokens_per_step
    if tree < 0.99 * chain:
        found.append(f"the tree makes {tree:.2f} tokens a step, the chain {chain:.2f}")
    return found


def _difference(title: str, part: str, prompt: str, a: Completion, b: Completion) -> str:
    at = next(
        (i for i, (x, y) in enumerate(zip(a.token_ids, b.token_ids, strict=False)) if x != y),
        min(len(a.token_ids), len(b.token_ids)),
    )
    return (
        f"{title}, {part}, prompt {prompt[:40]!r}…: from token {at} on {b.token_ids[at : at + 3]}, "
        f"without speculation {a.token_ids[at : at + 3]}"
    )
