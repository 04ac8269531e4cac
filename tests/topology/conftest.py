# SPDX-License-Identifier: Apache-2.0
"""Marks and leaves out what needs ansible-core, which the engine's environment need not have."""

import os
import shutil
import sys
from pathlib import Path

import pytest

_LEFT_OUT = pytest.StashKey[int]()


def find_playbook() -> str | None:
    """ansible-playbook of this environment, or the one DDTREE_ANSIBLE_PLAYBOOK names."""
    wanted = os.environ.get("DDTREE_ANSIBLE_PLAYBOOK")
    return shutil.which(wanted or str(Path(sys.executable).with_name("ansible-playbook")))


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "ansible: runs ansible-playbook on this machine")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if find_playbook():
        return
    drop = [item for item in items if item.get_closest_marker("ansible")]
    items[:] = [item for item in items if item not in drop]
    config.stash[_LEFT_OUT] = len(drop)
    config.hook.pytest_deselected(items=drop)


def pytest_terminal_summary(terminalreporter, config: pytest.Config) -> None:
    count = config.stash.get(_LEFT_OUT, 0)
    if count:
        terminalreporter.line(
            f"{count} tests marked ansible: no ansible-playbook in this environment; install "
            "ansible-core or set DDTREE_ANSIBLE_PLAYBOOK"
        )


@pytest.fixture(scope="session")
def playbook() -> str:
    found = find_playbook()
    assert found is not None
    return found
