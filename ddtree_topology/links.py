# SPDX-License-Identifier: Apache-2.0
"""The links of `nvidia-smi topo -m` and their order: NV# > PIX > PXB > PHB > NODE > SYS."""

from __future__ import annotations

import re

SELF = "X"
PCIE_LINKS = ("SYS", "NODE", "PHB", "PXB", "PIX")  # worst first
_NVLINK = re.compile(r"NV([1-9]\d?)")


def nvlinks(link: str) -> int:
    """Number of bonded NVLinks, 0 for a PCIe link."""
    match = _NVLINK.fullmatch(link)
    return int(match.group(1)) if match else 0


def is_link(cell: str) -> bool:
    return cell in PCIE_LINKS or nvlinks(cell) > 0


def rank(link: str) -> int:
    """1 (SYS) to 5 (PIX), then 5 + n for NVn: a higher rank is a better link.

    Raises:
        ValueError: not a link between two GPUs.
    """
    count = nvlinks(link)
    return len(PCIE_LINKS) + count if count else PCIE_LINKS.index(link) + 1


def link_of(link_rank: int) -> str:
    """The inverse of `rank`."""
    if link_rank > len(PCIE_LINKS):
        return f"NV{link_rank - len(PCIE_LINKS)}"
    return PCIE_LINKS[link_rank - 1]
