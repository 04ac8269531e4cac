# SPDX-License-Identifier: Apache-2.0
"""The outcome of the checks, for people, programs, systemd and Prometheus."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from .prometheus import quoted

CHECKS = ("live", "ready", "generates", "drafts", "gpu")
PASS, FAIL, UNKNOWN, SKIP = "pass", "fail", "unknown", "skip"
# Exit statuses. 64 (EX_USAGE) is a wrong call: it must never look like a hung engine.
HEALTHY, UNHEALTHY, HUNG, USAGE = 0, 1, 2, 64


@dataclass(frozen=True)
class Result:
    """Attributes:
    status: pass, fail, unknown (nothing to judge by yet) or skip (does not apply).
    because: one sentence.
    data: numbers and names behind it.
    hung: the engine does not work any more and a restart is the remedy.
    """

    check: str
    status: str
    because: str
    data: dict[str, Any] = field(default_factory=dict)
    hung: bool = False


@dataclass(frozen=True)
class Report:
    instance: str
    results: tuple[Result, ...]
    at: float

    @property
    def hung(self) -> bool:
        return any(result.hung for result in self.results)

    @property
    def failures(self) -> list[str]:
        return [f"{r.check}: {r.because}" for r in self.results if r.status == FAIL]

    @property
    def exit_status(self) -> int:
        if self.hung:
            return HUNG
        return UNHEALTHY if self.failures else HEALTHY

    @property
    def verdict(self) -> str:
        return ("healthy", "unhealthy", "hung")[self.exit_status]

    def as_json(self) -> str:
        return json.dumps(
            {
                "instance": self.instance,
                "verdict": self.verdict,
                "restart": self.hung,
                "failures": self.failures,
                "checks": {
                    r.check: {"status": r.status, "because": r.because, **r.data}
                    for r in self.results
                },
                "time": round(self.at, 3),
            },
            indent=2,
        )

    def as_text(self) -> str:
        """One line a check; the last line is the verdict."""
        lines = [f"{r.check:<9}  {r.status:<7}  {r.because}" for r in self.results]
        name = f" {self.instance}" if self.instance else ""
        return "\n".join([*lines, f"engine{name} is {self.verdict}"])

    def as_metrics(self) -> str:
        """Prometheus' text format, for node_exporter's textfile collector."""
        label = f"instance_name={quoted(self.instance)}"
        lines = _metric(
            "ddtree_health_verdict",
            "0 healthy, 1 unhealthy, 2 hung.",
            [(label, self.exit_status)],
        )
        lines += _metric(
            "ddtree_health_check",
            "1 passed, 0 failed, NaN unknown or not applicable.",
            [
                (
                    f"{label},check={quoted(r.check)}",
                    {PASS: 1, FAIL: 0}.get(r.status, float("nan")),
                )
                for r in self.results
            ],
        )
        for key, help_text in (
            ("acceptance_length", "Tokens per verified draft: 1 + accepted / drafts."),
            ("completion_seconds", "Time of the last completion asked for."),
            ("health_seconds", "Time in which /health answered."),
            ("stalled_seconds", "Time since unanswered work last saw progress."),
            ("restarts", "Restarts of the unit by systemd."),
        ):
            values = [(label, r.data[key]) for r in self.results if r.data.get(key) is not None]
            if values:
                lines += _metric(f"ddtree_health_{key}", help_text, values[:1])
        lines += _metric(
            "ddtree_health_last_run_timestamp_seconds",
            "When the checks last ran.",
            [(label, round(self.at, 3))],
        )
        return "\n".join(lines) + "\n"


def _metric(name: str, help_text: str, values: Sequence[tuple[str, float]]) -> list[str]:
    lines = [f"# HELP {name} {help_text}", f"# TYPE {name} gauge"]
    for labels, value in values:
        lines.append(f"{name}{{{labels}}} {'NaN' if math.isnan(value) else f'{value:.15g}'}")
    return lines
