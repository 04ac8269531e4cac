# SPDX-License-Identifier: Apache-2.0
"""The promise that `ddtree-models` needs nothing but Python 3.9 on a host."""

import ast
import sys
from pathlib import Path

import pytest

SOURCES = sorted((Path(__file__).parents[2] / "ddtree_models").glob("*.py"))


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_is_python_3_9_and_imports_the_standard_library_alone(path):
    tree = ast.parse(path.read_text(), feature_version=(3, 9))
    foreign = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            foreign |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            foreign.add(node.module.split(".")[0])
    assert not foreign - set(sys.stdlib_module_names)
