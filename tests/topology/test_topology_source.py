# SPDX-License-Identifier: Apache-2.0
"""The promise that there is one source."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "ddtree_topology"


def test_the_role_ships_this_very_source():
    shipped = ROOT / "roles/gpu_topology/module_utils/ddtree_topology"
    assert shipped.resolve() == PACKAGE.resolve()
    # A link inside the repository survives a clone to anywhere.
    assert not Path(shipped.readlink()).is_absolute()
