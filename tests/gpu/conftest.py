# SPDX-License-Identifier: Apache-2.0
"""GPU tests share the engine tests' harness and pairs.

Files are independent, and their engines small: `pytest -n 4 --dist loadfile --no-loadscope-reorder
tests/gpu` runs four at a time on one GPU.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
# Begun first: a worker that took one of them last would be alone at the end.
LONGEST = ("test_soak.py", "test_graphs.py")
sys.path.insert(0, str(HERE.parent / "engine"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            item.add_marker(pytest.mark.timeout(900))
    items.sort(key=lambda item: item.path.name not in LONGEST)


@pytest.fixture(scope="session")
def demo_pair() -> tuple[Path, Path]:
    demo = HERE.parents[1] / "demo"
    return demo / "target", demo / "drafter"


@pytest.fixture(scope="session")
def full_graphs() -> dict[str, Any]:
    """Engine options for CUDA graphs of whole decode steps without torch.compile: a quick start."""
    return {"compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}}
