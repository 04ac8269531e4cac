# SPDX-License-Identifier: Apache-2.0
"""Inventories as operators and templating engines write them."""

import pytest

from ddtree_topology.errors import TopologyError
from ddtree_topology.inventory import Gpu, gpus_from, unfit


def test_text_becomes_what_it_means():
    item = {
        "name": "NVIDIA H200",
        "uuid": "GPU-1",
        "memory_mib": "143771",
        "mig": "Disabled",
        "pci_bus_id": "00000000:01:00.0",
        "busy": "False",
        "cpus": "4,0-2,3",
        "numa": "0-1",
    }
    assert gpus_from([item]) == [
        Gpu(0, "NVIDIA H200", "GPU-1", 143771, False, "00000000:01:00.0", "", "0-4", (0, 1))
    ]


@pytest.mark.parametrize(
    ("value", "mig"),
    [("Enabled", True), (True, True), ("[N/A]", False), ("N/A", False), (None, False), ("", False)],
)
def test_mig_as_nvidia_smi_writes_it(value, mig):
    assert gpus_from([{"mig": value}])[0].mig is mig


@pytest.mark.parametrize(
    ("value", "busy"),
    [(True, "a process"), ("yes", "a process"), (False, ""), ("Xorg (pid 9)", "Xorg (pid 9)")],
)
def test_busy_may_name_the_process(value, busy):
    assert gpus_from([{"busy": value}])[0].busy == busy


def test_indices_may_come_in_any_order():
    gpus = gpus_from([{"index": 1, "name": "B"}, {"index": 0, "name": "A"}])
    assert [gpu.name for gpu in gpus] == ["A", "B"]


@pytest.mark.parametrize(
    ("items", "words"),
    [
        ([{"memory": 1}], "unknown key 'memory'"),
        ([{"memory_mib": "much"}], "gpus.0.: invalid literal"),
        ([{"mig": "perhaps"}], "'perhaps' is neither on nor off"),
        ([{"index": 1}], "are not 0, 1, 2"),
        ([{"uuid": "GPU-1"}, {"uuid": "GPU-1"}], "two GPUs have the uuid GPU-1"),
        ([{"cpus": "a-b"}], "is not a list such as 0-3,8"),
        (["GPU0"], "is not a mapping"),
    ],
)
def test_nonsense_is_refused(items, words):
    with pytest.raises(TopologyError, match=words):
        gpus_from(items)


def test_every_reason_against_a_gpu_is_given():
    assert unfit([Gpu(0, mig=True, busy="Xorg (pid 9)"), Gpu(1)]) == {
        0: "MIG is on (turn it off with `nvidia-smi -i 0 -mig 0`); in use by Xorg (pid 9)"
    }
