# SPDX-License-Identifier: Apache-2.0
"""Alerts: people are told once of a failure that lasts, and once of its end.

A metric serves those who look. An alert is for a host that nobody scrapes, so it must be rare: a
single slow completion is none, nor is each run of a failure that is known, nor one that comes and
goes. What has been told outlives the engine's start, since a restart need not mend it.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .errors import HealthError
from .report import FAIL, UNKNOWN, Report

# The service that tells is stopped after systemd's 90 s.
COMMAND_TIMEOUT_S = 30.0
_JOURNAL = ("systemd-cat", "--identifier=ddtree-alert")
# Sentences that wait for a program that does not take them; the oldest are dropped, the journal has them.
MOST_PENDING = 20
_LONGEST = 4000


def judge(
    saved: Mapping[str, Any], report: Report, *, start: str, now: float, after_s: float
) -> dict[str, Any]:
    """What is known after this run, and what is still to be told.

    A check that has failed for `after_s` without a pass is told, a hang at once; the end is told when
    none has failed for as long. While the engine starts only its GPUs are judged: systemd bounds the
    start and has an alert of its own.

    Args:
        saved: what the last run left, or nothing; what is damaged counts as nothing.
        report: of this run. A check that knows nothing (unknown) leaves its clock as it is.
        start: systemd's name of this start of the engine; empty while it does not count as started.
            What failed in another start says nothing of this one, its GPUs excepted.
        now: monotonic seconds.

    Returns:
        JSON of `start`, `at` (second of this run), `failing` (check -> second it began), `told`
        (checks), `well_since` (second, or None) and `pending` (list of [priority, sentence], oldest
        first, see `tell`).
    """
    # Seconds of a boot that is over, of a file that outlived it, count as damaged.
    saved = saved if _is_whole(saved) and saved.get("at", now) <= now else {}
    running, same = bool(start), saved.get("start") == start
    failing: dict[str, float] = dict(saved.get("failing", {}))
    told: list[str] = list(saved.get("told", []))
    pending: list[list[str]] = list(saved.get("pending", []))
    if not same:
        failing = {check: since for check, since in failing.items() if check == "gpu"}
    fails = []
    for result in report.results:
        if not running and result.check != "gpu":
            continue
        if result.status == FAIL:
            failing.setdefault(result.check, now)
            fails.append(result)
        elif result.status != UNKNOWN:
            failing.pop(result.check, None)
    well_since = None
    if running and not failing:
        since = saved.get("well_since") if same else None
        well_since = now if since is None else since
    due = {r.check for r in fails if r.hung or now - failing[r.check] >= after_s}
    if due - set(told):
        told = sorted(due.union(told))
        verdict = "hung" if any(r.hung for r in fails) else "unhealthy"
        pending.append(
            ["alert", f"is {verdict}: " + "; ".join(f"{r.check}: {r.because}" for r in fails)]
        )
    elif told and well_since is not None and now - well_since >= after_s:
        told = []
        pending.append(["notice", "is healthy again"])
    return {
        "start": start,
        "at": now,
        "failing": failing,
        "told": told,
        "well_since": well_since,
        "pending": pending[-MOST_PENDING:],
    }


def _is_whole(saved: Mapping[str, Any]) -> bool:
    """Whether a file holds what `judge` returns."""
    failing, told = saved.get("failing", {}), saved.get("told", [])
    return (
        isinstance(failing, dict)
        and all(isinstance(since, (int, float)) for since in failing.values())
        and isinstance(told, list)
        and all(isinstance(check, str) for check in told)
        and isinstance(saved.get("well_since"), (int, float, type(None)))
        and isinstance(saved.get("at", 0), (int, float))
        and can_be_told(saved.get("pending", []))
    )


def can_be_told(pending: object) -> bool:
    """Whether this is a list of [priority, sentence]."""
    return isinstance(pending, list) and all(
        isinstance(item, list) and len(item) == 2 and all(isinstance(word, str) for word in item)
        for item in pending
    )


def tell(
    subject: str,
    pending: Sequence[Sequence[str]],
    command: Sequence[str],
    keep: Callable[[list[list[str]]], None],
) -> None:
    """Writes what is pending to the journal, and runs a command for each.

    A journal that does not work keeps no program from being told.

    Args:
        subject: who it is about: the engine's unit.
        pending: [priority, sentence] each; without a priority the journal has it already.
        command: program and arguments, to which the subject and the sentence are added; may be empty.
        keep: is handed what is still pending, after each step: a run that is ended repeats none.

    Raises:
        HealthError: something is still pending, or could not be kept.
    """
    left = [list(item) for item in pending]
    while left:
        priority, sentence = left[0]
        words = "".join(c if c.isprintable() else " " for c in f"{subject} {sentence}")[:_LONGEST]
        if priority:
            try:
                _run([*_JOURNAL, f"--priority={priority}", "echo", words])
            except HealthError:
                if not command:
                    raise
            left[0][0] = ""
            keep(left)
        if command:
            _run([*command, subject, words])
        del left[0]
        keep(left)


def _run(command: Sequence[str]) -> None:
    name = command[0]
    try:
        done = subprocess.run(command, check=False, timeout=COMMAND_TIMEOUT_S)
    except OSError as error:
        raise HealthError(f"{name} cannot be run: {error.strerror}") from None
    except subprocess.TimeoutExpired:
        raise HealthError(f"{name} has not ended after {COMMAND_TIMEOUT_S:.0f} s") from None
    if done.returncode != 0:
        raise HealthError(f"{name} ended with {done.returncode}")
