# SPDX-License-Identifier: Apache-2.0
"""Drafts: the target accepts enough of what the drafter proposes.

Acceptance length = 1 + accepted / drafts, tokens per verification. The ratio of accepted to drafted
tokens means nothing for a tree: most of its nodes are siblings, of which one at best is accepted.
"""

from __future__ import annotations

from typing import Any

from .report import FAIL, PASS, SKIP, UNKNOWN, Result
from .server import ACCEPTED, DRAFTS, GENERATED, Sample

# Fewer verifications than this say little of the drafter.
LEAST_DRAFTS = 64
# Tokens without a single draft that show that nothing is drafted.
LEAST_TOKENS = 256


def judge(state: dict[str, Any], sample: Sample, floor: float) -> tuple[Result, dict[str, Any]]:
    """Judges the verifications since the last window ended, or since the engine started.

    Args:
        state: what the last run left: the counters at the window's start, and its last result.
        floor: least acceptance length; 0 is an engine without speculation.

    Returns:
        The result, and the state for the next run.
    """
    if not floor:
        return Result("drafts", SKIP, "no floor is set"), {}
    now = {name: sample.value(name) for name in (DRAFTS, ACCEPTED, GENERATED)}
    start = state.get("start") or {}
    if any(now[name] < start.get(name, 0.0) for name in now):
        start, state = {}, {}
    drafts = now[DRAFTS] - start.get(DRAFTS, 0.0)
    accepted = now[ACCEPTED] - start.get(ACCEPTED, 0.0)
    tokens = now[GENERATED] - start.get(GENERATED, 0.0)
    if not drafts and tokens >= LEAST_TOKENS:
        why = f"{tokens:.0f} tokens were generated and nothing was drafted"
        return Result("drafts", FAIL, why), {"start": start}
    if drafts >= LEAST_DRAFTS:
        length, count = 1 + accepted / drafts, drafts
        after = {"start": now, "length": length, "drafts": count}
    elif state.get("length") is not None:
        length, count = state["length"], state["drafts"]
        after = {"start": start, "length": length, "drafts": count}
    else:
        why = f"{drafts:.0f} verifications so far, too few to judge"
        return Result("drafts", UNKNOWN, why), {"start": start}
    data = {"acceptance_length": round(length, 3)}
    words = f"{length:.2f} tokens per verification, over {count:.0f}"
    if length < floor:
        return Result("drafts", FAIL, f"{words}; the floor is {floor:g}", data), after
    return Result("drafts", PASS, words, data), after
