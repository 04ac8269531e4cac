# SPDX-License-Identifier: Apache-2.0
"""What a check found."""

from __future__ import annotations

from dataclasses import dataclass

REFUSE, WARN, PASS = "refuse", "warn", "pass"


@dataclass(frozen=True)
class Finding:
    """One sentence of one check.

    Attributes:
        level: REFUSE: it would not serve. WARN: it would, and somebody should know. PASS: what was seen.
    """

    check: str
    level: str
    sentence: str


def refuse(check: str, sentence: str) -> Finding:
    return Finding(check, REFUSE, sentence)


def warn(check: str, sentence: str) -> Finding:
    return Finding(check, WARN, sentence)


def passed(check: str, sentence: str) -> Finding:
    return Finding(check, PASS, sentence)
