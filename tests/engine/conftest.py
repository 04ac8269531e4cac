# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from pathlib import Path

import pytest
from compatibility import Compatibility
from tiny_pair import write_tiny_pair

DEMO = Path(__file__).parents[2] / "demo"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.engine)
            item.add_marker(pytest.mark.timeout(1200))


@pytest.fixture(scope="session")
def demo_pair() -> tuple[Path, Path]:
    return DEMO / "target", DEMO / "drafter"


@pytest.fixture(scope="session")
def tiny_pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return write_tiny_pair(tmp_path_factory.mktemp("tiny_pair"))


@pytest.fixture(scope="session")
def compatibility(request: pytest.FixtureRequest) -> Compatibility:
    """Where tests of features record what they found."""
    return Compatibility(write=request.config.getoption("--write-compatibility"))
