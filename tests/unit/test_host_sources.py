# SPDX-License-Identifier: Apache-2.0
"""The promise that programs on a host need nothing but its Python, 3.9 or newer."""

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("ddtree_health", "ddtree_models", "ddtree_preflight", "ddtree_topology")
# Sources of modules and of programs that roles copy; what has no suffix says its interpreter.
IN_ROLES = [
    path
    for folder in ("files", "library")
    for path in sorted(ROOT.glob(f"roles/*/{folder}/*"))
    if path.is_file() and (path.suffix == ".py" or "python" in path.read_text().split("\n", 1)[0])
]
SOURCES = [
    *(path for package in PACKAGES for path in sorted((ROOT / package).glob("**/*.py"))),
    *IN_ROLES,
]
# The ranks of the topology's probe run under the Python that has torch.
ALLOWED = {"rank.py": {"torch"}}


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_is_python_3_9_and_imports_the_standard_library_alone(path):
    tree = ast.parse(path.read_text(), feature_version=(3, 9))
    foreign = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            foreign |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            foreign.add(node.module.split(".")[0])
    # A module of Ansible's has Ansible beside it.
    allowed = ALLOWED.get(path.name, set()) | (
        {"ansible"} if path.parent.name == "library" else set()
    )
    assert foreign - set(sys.stdlib_module_names) <= allowed


def test_all_of_them_are_found():
    assert {path.name for path in IN_ROLES} >= {"facts.py", "cuda_init.py", "gpu_topology.py"}
    assert len(SOURCES) > 30
