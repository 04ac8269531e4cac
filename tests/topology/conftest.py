# SPDX-License-Identifier: Apache-2.0
"""Where ansible-playbook is."""

import os
import shutil
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def find_playbook() -> str | None:
    """ansible-playbook of .venv-ansible, or the one DDTREE_ANSIBLE_PLAYBOOK names."""
    wanted = os.environ.get("DDTREE_ANSIBLE_PLAYBOOK")
    return shutil.which(wanted or str(ROOT / ".venv-ansible/bin/ansible-playbook"))


@pytest.fixture(scope="session")
def playbook() -> str:
    found = find_playbook()
    assert found is not None
    return found
