# SPDX-License-Identifier: Apache-2.0
"""Linux lists of CPUs and memory nodes: "0-3,8" and the sets they stand for."""

from __future__ import annotations

import re
from collections.abc import Iterable

_LIST = re.compile(r"\d+(-\d+)?(,\d+(-\d+)?)*")
# Far above any host (the kernel's own limit is 8192); keeps a garbled range from filling memory.
_LIMIT = 65536


def parse(text: str) -> frozenset[int]:
    """ "0-3,8" -> {0, 1, 2, 3, 8}.

    Raises:
        ValueError: not such a list, a range that runs backwards, or a number above 65535.
    """
    text = text.strip()
    if not _LIST.fullmatch(text):
        raise ValueError(f"{text!r} is not a list such as 0-3,8")
    members: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        low, high = int(first), int(last or first)
        if low > high or high >= _LIMIT:
            raise ValueError(f"{part!r} is not a range of CPUs or nodes")
        members.update(range(low, high + 1))
    return frozenset(members)


def format_list(members: Iterable[int]) -> str:
    """{0, 1, 2, 3, 8} -> "0-3,8"; "" for nothing."""
    runs: list[list[int]] = []
    for member in sorted(set(members)):
        if runs and member == runs[-1][1] + 1:
            runs[-1][1] = member
        else:
            runs.append([member, member])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in runs)
