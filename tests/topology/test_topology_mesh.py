# SPDX-License-Identifier: Apache-2.0
"""GPUs that lost NVLinks, and machines that only look as if they had."""

import pytest
import topology_machines as machines

from ddtree_topology.mesh import degraded

PEERS_OF_3 = [(3, peer) for peer in range(8) if peer != 3]
WHOLE = ["01", "03", "05", "06", "07", "10", "12", "13", "14", "17", "19", "21", "22", "23", "26"]


@pytest.mark.parametrize("number", WHOLE)
def test_a_whole_machine_has_no_degraded_gpu(number):
    matrix = machines.machine(number)
    assert degraded(matrix.links, range(matrix.count)) == {}


@pytest.mark.parametrize("link", ["NODE", "SYS", "PHB"])
def test_a_gpu_that_lost_all_nvlinks_is_degraded(link):
    matrix = machines.relinked(machines.machine("01"), PEERS_OF_3, link)
    found = degraded(matrix.links, range(8))
    assert list(found) == [3]
    assert found[3] == (
        "NVLink lost: reaches GPU0, GPU1, GPU2, GPU4, GPU5, GPU6, GPU7 "
        f"by {link} inside a mesh of NV18"
    )


def test_a_gpu_that_lost_some_nvlinks_of_a_switch_is_degraded():
    matrix = machines.relinked(machines.machine("01"), PEERS_OF_3, "NV12")
    assert degraded(matrix.links, range(8)) == {
        3: "NVLinks lost: NV12 to every peer, where the others have NV18"
    }


def test_three_of_eight_lost_are_found():
    pairs = [(i, j) for i in (1, 4, 6) for j in range(8) if i != j]
    matrix = machines.relinked(machines.machine("23"), pairs, "SYS")
    assert sorted(degraded(matrix.links, range(8))) == [1, 4, 6]


def test_a_broken_link_between_two_gpus_makes_both_suspect():
    matrix = machines.relinked(machines.machine("13"), [(1, 2)], "SYS")
    assert sorted(degraded(matrix.links, range(4))) == [1, 2]


def test_gpus_of_another_kind_do_not_count():
    matrix = machines.relinked(machines.machine("13"), [(3, 0), (3, 1), (3, 2)], "SYS")
    assert sorted(degraded(matrix.links, range(4))) == [3]
    assert degraded(matrix.links, [0, 1, 2]) == {}


def test_a_pair_and_a_single_gpu_are_not_a_mesh():
    matrix = machines.relinked(machines.machine("26"), [(0, 1)], "NV4")
    assert degraded(matrix.links, [0, 1, 2]) == {}
