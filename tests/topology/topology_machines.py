# SPDX-License-Identifier: Apache-2.0
"""Matrices of real machines, and alterations of them."""

from __future__ import annotations

import random
from pathlib import Path

from ddtree_topology.inventory import Gpu
from ddtree_topology.matrix import Matrix, parse_matrix

FIXTURES = Path(__file__).parent / "fixtures"
H200 = "NVIDIA H200"
H200_MIB = 143771


def path(number: str) -> Path:
    (found,) = FIXTURES.glob(f"{number}-*.txt")
    return found


def text(number: str) -> str:
    return path(number).read_text()


def machine(number: str) -> Matrix:
    return parse_matrix(text(number))


def relinked(matrix: Matrix, pairs: list[tuple[int, int]], link: str) -> Matrix:
    """The machine with other links between some pairs."""
    table = [list(row) for row in matrix.links]
    for i, j in pairs:
        table[i][j] = table[j][i] = link
    return Matrix(tuple(map(tuple, table)), matrix.cpus, matrix.numa)


def reordered(matrix: Matrix, order: list[int]) -> Matrix:
    """The machine with its GPUs in other slots: new GPU k is old GPU order[k]."""
    return Matrix(
        tuple(tuple(matrix.links[i][j] for j in order) for i in order),
        tuple(matrix.cpus[i] for i in order),
        tuple(matrix.numa[i] for i in order),
    )


def alike(count: int, name: str = H200, memory_mib: int = H200_MIB, **changes: dict) -> list[Gpu]:
    """`count` GPUs of one kind; `gpu3={"mig": True}` changes one of them."""
    gpus = []
    for index in range(count):
        known = {
            "name": name,
            "uuid": f"GPU-{index:08x}",
            "memory_mib": memory_mib,
            "pci_bus_id": f"00000000:{index + 1:02X}:00.0",
        }
        known.update(changes.get(f"gpu{index}", {}))
        gpus.append(Gpu(index, **known))
    return gpus


def random_matrix(count: int, rng: random.Random) -> Matrix:
    """Any symmetric links, which no machine needs to have; NUMA nodes known or not."""
    choices = rng.choice((["SYS", "NODE", "PIX"], ["SYS", "PHB", "NV4"], ["NV1", "NV2", "SYS"]))
    table = [["X"] * count for _ in range(count)]
    for i in range(count):
        for j in range(i):
            table[i][j] = table[j][i] = rng.choice(choices)
    numa = [rng.choice([(0,), (1,), (0, 1), None]) for _ in range(count)]
    return Matrix(tuple(map(tuple, table)), ("0-7",) * count, tuple(numa))
