# SPDX-License-Identifier: Apache-2.0
"""A plan as a picture: a table for the terminal, an SVG for everything else.

Both show the link matrix with its rows and columns sorted by group, so that groups are blocks along
the diagonal, excluded GPUs last.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from .links import PCIE_LINKS, SELF, nvlinks

_RESET = "\x1b[0m"
_GROUP_COLOURS = (36, 33, 35, 32, 34, 31, 96, 93)  # ANSI foregrounds, one per group


def _order(plan: Mapping[str, Any]) -> list[tuple[int, int | None]]:
    """(GPU, number of its group or None), groups first."""
    grouped = [
        (int(gpu), number) for number, group in enumerate(plan["groups"]) for gpu in group["gpus"]
    ]
    taken = {gpu for gpu, _ in grouped}
    return grouped + [
        (int(gpu), None) for gpu in sorted(map(int, plan["gpus"])) if gpu not in taken
    ]


def _title(plan: Mapping[str, Any]) -> str:
    names = sorted({gpu["name"] for gpu in plan["gpus"].values() if gpu["name"]})
    hardware = " + ".join(names) if names else "GPU"
    count, groups = len(plan["gpus"]), len(plan["groups"])
    if not count:
        return "CPU only, 1 instance"
    return (
        f"{count} x {hardware}: {groups} instance{'s' if groups > 1 else ''} "
        f"of TP {plan['tensor_parallel']}, for {plan['objective']}"
    )


def _group_text(group: Mapping[str, Any]) -> str:
    parts = [
        "GPU " + " ".join(map(str, group["gpus"])) if group["gpus"] else "no GPU",
        f"worst link {group['worst_link']}" if group["worst_link"] else "",
        f"CPUs {group['cpuset']}" if group["cpuset"] else "CPUs unknown",
        f"memory node {group['memory_node']}" if group["memory_node"] else "memory node unknown",
        f"port {group['port']}",
    ]
    return ", ".join(filter(None, parts))


def table(plan: Mapping[str, Any], colour: bool = False) -> str:
    """The plan in lines of text, ending in a newline.

    Links inside a group stand in brackets; `colour` adds ANSI colours.
    """
    order = _order(plan)
    lines = [_title(plan), ""]
    if order:
        head = [f"GPU{gpu}".center(7) for gpu, _ in order]
        lines.append((" " * 8 + "".join(head)).rstrip())
        previous: int | None = order[0][1]
        for gpu, number in order:
            if number != previous:
                lines.append("")
                previous = number
            label = "-" if number is None else str(number)
            cells = [
                _cell(plan["gpus"][str(gpu)]["links"][peer], number, other, colour)
                for peer, other in order
            ]
            lines.append((f"{label:>2} {f'GPU{gpu}':<5}" + "".join(cells)).rstrip())
        lines.append("")
    for number, group in enumerate(plan["groups"]):
        lines.append(f"instance {group['instance']}: {_group_text(group)}")
        if colour:
            lines[-1] = _painted(lines[-1], number)
    for gpu, reason in plan["excluded"].items():
        lines.append(f"GPU{gpu} excluded: {reason}")
    lines += ["", *(f"why: {line}" for line in plan["why"])]
    for choice in plan["choices"]:
        lines.append(
            f"     TP {choice['tensor_parallel']}: {choice['groups']} "
            f"group{'s' if choice['groups'] > 1 else ''}"
            + (f", worst link {choice['worst_link']}" if choice["worst_link"] else "")
            + (f", {choice['idle']} idle" if choice["idle"] else "")
            + f": {choice['why']}"
        )
    lines += [f"warning: {line}" for line in plan["warnings"]]
    return "\n".join(lines) + "\n"


def _cell(link: str, number: int | None, other: int | None, colour: bool) -> str:
    if link == SELF:
        return "·".center(7)
    inside = number is not None and number == other
    text = (f"[{link}]" if inside else link).center(7)
    if not colour:
        return text
    return _painted(text, number or 0) if inside else f"\x1b[2m{text}{_RESET}"


def _painted(text: str, number: int) -> str:
    return f"\x1b[{_GROUP_COLOURS[number % len(_GROUP_COLOURS)]}m{text}{_RESET}"


# Darker is better; one hue for PCIe, one for NVLink. (background, text)
_PAINT = {
    "SYS": ("#f3f4f6", "#4b5563"),
    "NODE": ("#e3ecf7", "#334155"),
    "PHB": ("#cfe0f4", "#1e3a5f"),
    "PXB": ("#aecbeb", "#12304f"),
    "PIX": ("#82aede", "#0b2440"),
}
_NVLINK_PAINT = (("#c9e7b1", "#1f3d0c"), ("#97cf6b", "#17320a"), ("#62ac2f", "#0d2405"))
_OUTLINES = ("#0f766e", "#b45309", "#7c3aed", "#be123c", "#1d4ed8", "#4d7c0f", "#a21caf", "#0e7490")
_CELL, _LEFT, _TOP, _GAP = 54, 92, 92, 10
_FONT = "system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif"


def svg(plan: Mapping[str, Any]) -> str:
    """The plan as a stand-alone SVG document."""
    order = _order(plan)
    starts = _starts([number for _, number in order])
    side = (starts[-1] + _CELL) if order else 0
    below = _TOP + side + 34
    notes = _notes(plan)
    legend = _legend(plan)
    width = max(_LEFT + side + 24, 24 + max((len(text) for text, _ in notes), default=0) * 8, 560)
    height = below + 24 * len(notes) + (44 if legend else 0) + 16
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" font-family="{_FONT}" role="img">',
        f"<title>{escape(_title(plan))}</title>",
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        _text(24, 36, _title(plan), size=18, weight=600, anchor="start"),
    ]
    for row, (gpu, number) in enumerate(order):
        middle = starts[row] + _CELL // 2
        fill = "#9ca3af" if number is None else "#111827"
        parts.append(_text(_LEFT + middle, _TOP - 12, f"GPU{gpu}", fill=fill, weight=600))
        parts.append(
            _text(_LEFT - 12, _TOP + middle + 5, f"GPU{gpu}", anchor="end", fill=fill, weight=600)
        )
        for column, (peer, other) in enumerate(order):
            link = plan["gpus"][str(gpu)]["links"][peer]
            faded = number is None or other is None
            parts.append(_square(_LEFT + starts[column], _TOP + starts[row], link, faded))
    for number in range(len(plan["groups"])):
        rows = [row for row, (_, other) in enumerate(order) if other == number]
        if rows:
            first, last = starts[rows[0]], starts[rows[-1]] + _CELL
            parts.append(
                f'<rect x="{_LEFT + first - 2}" y="{_TOP + first - 2}" width="{last - first + 4}" '
                f'height="{last - first + 4}" rx="8" fill="none" stroke-width="3" '
                f'stroke="{_OUTLINES[number % len(_OUTLINES)]}"/>'
            )
    for row, (text, fill) in enumerate(notes):
        parts.append(_text(24, below + 24 * row, text, anchor="start", fill=fill))
    for place, link in enumerate(legend):
        x, y = 24 + place * 84, below + 24 * len(notes) + 4
        background, _ = _paint(link)
        parts.append(
            f'<rect x="{x}" y="{y}" width="18" height="18" rx="4" fill="{background}" '
            f'stroke="#d1d5db"/>'
        )
        parts.append(_text(x + 26, y + 14, link, anchor="start", fill="#374151", size=13))
    return "\n".join([*parts, "</svg>", ""])


def _starts(numbers: Sequence[int | None]) -> list[int]:
    """Where each row begins, in pixels: a gap parts the groups."""
    starts: list[int] = []
    at = 0
    for row, number in enumerate(numbers):
        if row and number != numbers[row - 1]:
            at += _GAP
        starts.append(at)
        at += _CELL
    return starts


def _notes(plan: Mapping[str, Any]) -> list[tuple[str, str]]:
    notes = [
        (
            f"instance {group['instance']}: {_group_text(group)}",
            _OUTLINES[number % len(_OUTLINES)],
        )
        for number, group in enumerate(plan["groups"])
    ]
    notes += [(f"GPU{gpu} excluded: {why}", "#b91c1c") for gpu, why in plan["excluded"].items()]
    if any(len(group["gpus"]) > 1 for group in plan["groups"]):
        notes.append((plan["p2p"]["because"], "#374151"))
    return notes


def _legend(plan: Mapping[str, Any]) -> list[str]:
    """The links that occur, worst first."""
    seen = {link for gpu in plan["gpus"].values() for link in gpu["links"]} - {SELF}
    nv = sorted((link for link in seen if nvlinks(link)), key=nvlinks)
    return [link for link in PCIE_LINKS if link in seen] + nv


def _paint(link: str) -> tuple[str, str]:
    count = nvlinks(link)
    if count:
        return _NVLINK_PAINT[0 if count < 4 else 1 if count < 12 else 2]
    return _PAINT[link]


def _square(x: int, y: int, link: str, faded: bool) -> str:
    if link == SELF:
        return (
            f'<rect x="{x + 1}" y="{y + 1}" width="{_CELL - 2}" height="{_CELL - 2}" rx="6" '
            'fill="#ffffff" stroke="#e5e7eb"/>'
        )
    background, ink = _paint(link)
    label = _text(x + _CELL // 2, y + _CELL // 2 + 5, link, fill=ink, size=13)
    opacity = ' opacity="0.35"' if faded else ""
    return (
        f"<g{opacity}>"
        f'<rect x="{x + 1}" y="{y + 1}" width="{_CELL - 2}" height="{_CELL - 2}" rx="6" '
        f'fill="{background}"/>{label}</g>'
    )


def _text(
    x: int,
    y: int,
    text: str,
    *,
    anchor: str = "middle",
    fill: str = "#111827",
    size: int = 14,
    weight: int = 400,
) -> str:
    return (
        f'<text x="{x}" y="{y}" text-anchor="{anchor}" fill="{fill}" font-size="{size}" '
        f'font-weight="{weight}">{escape(text)}</text>'
    )
