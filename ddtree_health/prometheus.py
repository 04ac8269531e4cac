# SPDX-License-Identifier: Apache-2.0
"""Prometheus' text format, as much of it as counters and gauges need."""

from __future__ import annotations

import re

_LINE = re.compile(r"^([A-Za-z_:][\w:]*)(?:\{.*\})?\s+(\S+)")


def parse(text: str) -> dict[str, float]:
    """Value of each metric, summed over its labels; lines that are not numbers are passed over."""
    values: dict[str, float] = {}
    for line in text.splitlines():
        match = _LINE.match(line)
        if match is None:
            continue
        try:
            value = float(match.group(2))
        except ValueError:
            continue
        values[match.group(1)] = values.get(match.group(1), 0.0) + value
    return values


def quoted(text: str) -> str:
    """A label value."""
    text = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{text}"'
