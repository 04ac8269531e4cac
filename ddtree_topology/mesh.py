# SPDX-License-Identifier: Apache-2.0
"""GPUs that lost NVLinks the others still have.

A GPU whose links failed shows PCIe (NODE, SYS, ...) or fewer NVLinks inside what is otherwise a
full NVLink mesh. Machines that never had a full mesh, such as bridged pairs and the hybrid cube
mesh of eight V100s, must not be mistaken for damaged ones; so a GPU is called degraded only against
a majority that is fully linked without it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

from .links import nvlinks

_SMALLEST_MESH = 3


def degraded(table: Sequence[Sequence[str]], members: Sequence[int]) -> dict[int, str]:
    """GPUs of `members` that lost NVLinks: index -> reason, a phrase.

    Args:
        table: links between all GPUs, as in `Matrix.links`.
        members: GPUs of one kind; others are ignored.
    """
    sound = _sound_mesh(table, members)
    if sound is None:
        return {}
    reasons = {}
    for gpu in members:
        if gpu in sound:
            continue
        lost = [peer for peer in members if peer != gpu and not nvlinks(table[gpu][peer])]
        by = "/".join(sorted({table[gpu][peer] for peer in lost}))
        reasons[gpu] = (
            f"NVLink lost: reaches {_names(lost)} by {by} inside a mesh of "
            f"{table[sound[0]][sound[1]]}"
        )
    reasons.update(_thin(table, sound))
    return reasons


def _sound_mesh(table: Sequence[Sequence[str]], members: Sequence[int]) -> list[int] | None:
    """GPUs that belong to every largest full NVLink mesh, if those are most of `members`."""
    total = len(members)
    for size in range(total, max(total // 2, _SMALLEST_MESH - 1), -1):
        meshes = [
            set(group)
            for group in combinations(members, size)
            if all(nvlinks(table[i][j]) for i, j in combinations(group, 2))
        ]
        if meshes:
            # One broken link between two GPUs leaves two such meshes; neither GPU is in both.
            common = set.intersection(*meshes)
            enough = len(common) >= 2 and 2 * len(common) >= total
            return sorted(common) if enough else None
    return None


def _thin(table: Sequence[Sequence[str]], mesh: Sequence[int]) -> dict[int, str]:
    """GPUs with fewer NVLinks than most, where a switch gives each pair the lesser GPU's links."""
    if len(mesh) <= _SMALLEST_MESH:
        return {}
    width = {i: max(nvlinks(table[i][j]) for j in mesh if j != i) for i in mesh}
    full = max(width.values())
    switched = all(
        nvlinks(table[i][j]) == min(width[i], width[j]) for i, j in combinations(mesh, 2)
    )
    thin = [gpu for gpu in mesh if width[gpu] < full]
    if not switched or 2 * len(thin) >= len(mesh):
        return {}
    return {
        gpu: f"NVLinks lost: NV{width[gpu]} to every peer, where the others have NV{full}"
        for gpu in thin
    }


def _names(gpus: Sequence[int]) -> str:
    return ", ".join(f"GPU{gpu}" for gpu in gpus)
