# SPDX-License-Identifier: Apache-2.0
"""Live: the engine makes progress on its work, or has none.

The rule. Work is unanswered when the engine holds requests, when a completion of our own timed out,
or when the server does not answer at all. A clock starts when unanswered work is first seen and
starts anew whenever a counter has moved. An engine whose clock reaches the limit is hung. How fast
/health answers plays no part: a busy engine can be slow, and a hung one answers 200.

Counters that rest while there is no work say nothing, so the time before work was seen never
counts: an engine idle for hours is not hung when its first request comes in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .report import FAIL, PASS, UNKNOWN, Result
from .server import STEPS, Sample


@dataclass(frozen=True)
class Clock:
    """Attributes:
    counters: as last seen, None if never.
    since: monotonic second at which unanswered work was first seen at these counters.
    """

    counters: dict[str, float] | None = None
    since: float | None = None

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Clock:
        saved = state.get("clock") or {}
        return cls(saved.get("counters"), saved.get("since"))

    def as_state(self) -> dict[str, Any]:
        return {"counters": self.counters, "since": self.since}


def judge(
    clock: Clock,
    samples: Sequence[Sample],
    *,
    stall_after_s: float,
    unanswered_since: float | None = None,
    engine_dead: bool = False,
) -> tuple[Result, Clock]:
    """Judges one run's samples, oldest first.

    Args:
        clock: what the last run left.
        stall_after_s: unanswered work without progress for this long means hung.
        unanswered_since: when a completion of our own was sent that timed out.
        engine_dead: /health answered 503: the server knows that its engine is gone.

    Returns:
        The result, and the clock for the next run.
    """
    seen, since = clock.counters, clock.since
    progressed, steps = False, 0.0
    for sample in samples:
        counters = sample.counters
        if counters is None:
            since = sample.at if since is None else since
            continue
        if seen is not None and counters != seen:
            steps += max(counters.get(STEPS, 0.0) - seen.get(STEPS, 0.0), 0.0)
            since, progressed = None, True
        seen = counters
        if sample.work:
            since = sample.at if since is None else since
        elif unanswered_since is None and not engine_dead:
            since = None
    first, last = samples[0], samples[-1]
    if unanswered_since is not None and since is None and first.counters == last.counters:
        since = unanswered_since
    if engine_dead and since is None:
        since = first.at
    after = Clock(seen, since)
    if since is None:
        why = f"{steps:.0f} steps since the last look" if progressed else "idle"
        return Result("live", PASS, why, {"stalled_seconds": 0.0, "progress": progressed}), after
    stalled = round(last.at - since, 1)
    data = {"stalled_seconds": stalled, "progress": progressed}
    if last.metrics is None:
        what = last.silence
    elif engine_dead:
        what = "/health says that the engine is dead"
    elif last.work:
        what = f"{last.work} requests in the engine and no counter moves"
    else:
        what = "a completion is not answered and no counter moves"
    if stalled >= stall_after_s:
        return Result("live", FAIL, f"hung: {what}, for {stalled:g} s", data, hung=True), after
    if progressed and last.metrics is not None and not engine_dead:
        why = f"{steps:.0f} steps since the last look, {last.work} requests in the engine"
        return Result("live", PASS, why, data), after
    return (
        Result("live", UNKNOWN, f"{what}, for {stalled:g} s (limit {stall_after_s:g} s)", data),
        after,
    )
