# SPDX-License-Identifier: Apache-2.0
"""GPU tests share the engine tests' harness and pairs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ENGINE_TESTS = Path(__file__).parents[1] / "engine"
sys.path.insert(0, str(ENGINE_TESTS))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            item.add_marker(pytest.mark.timeout(1800))


@pytest.fixture(scope="session")
def demo_pair() -> tuple[Path, Path]:
    demo = Path(__file__).parents[2] / "demo"
    return demo / "target", demo / "drafter"
