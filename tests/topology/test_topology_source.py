# SPDX-License-Identifier: Apache-2.0
"""The promise that hosts need nothing but Python 3.9, and that there is one source."""

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "ddtree_topology"
SOURCES = sorted(PACKAGE.glob("*.py"))
ON_HOSTS = [*SOURCES, *sorted((ROOT / "roles/gpu_topology/library").glob("*.py"))]


@pytest.mark.parametrize("path", ON_HOSTS, ids=lambda path: path.name)
def test_is_python_3_9(path):
    ast.parse(path.read_text(), feature_version=(3, 9))


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_imports_the_standard_library_alone(path):
    foreign = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            foreign |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            foreign.add(node.module.split(".")[0])
    # The probe's ranks run under the Python that has torch.
    allowed = {"torch"} if path.name == "rank.py" else set()
    assert foreign - set(sys.stdlib_module_names) <= allowed


def test_the_role_ships_this_very_source():
    shipped = ROOT / "roles/gpu_topology/module_utils/ddtree_topology"
    assert shipped.resolve() == PACKAGE.resolve()
    # A link inside the repository survives a clone to anywhere.
    assert not Path(shipped.readlink()).is_absolute()
