# SPDX-License-Identifier: Apache-2.0
"""Peer access: one decision, and every switch follows it."""

import pytest
import topology_machines as machines
from test_topology_planner import P2P_OFF_ARGUMENTS, P2P_OFF_NCCL, P2P_OFF_VLLM

from ddtree_topology.errors import TopologyError
from ddtree_topology.matrix import parse_p2p
from ddtree_topology.planner import plan


def verdict_for(made, **changes):
    return {
        "version": 1,
        "backend": "nccl",
        "p2p": True,
        "collectives": True,
        "because": "P2P is on: every group finished its all-reduces with the right sums.",
        "fingerprint": made["fingerprint"],
        **changes,
    }


def switched(made):
    """Whether P2P is on, checked to be the same in every switch of every group."""
    found = set()
    for group in made["groups"]:
        off = (
            group["nccl_env"] == P2P_OFF_NCCL,
            group["env"] == {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", **P2P_OFF_VLLM},
            group["engine_args"][4:] == P2P_OFF_ARGUMENTS,
        )
        on = (
            group["nccl_env"] == {},
            group["env"] == {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"},
            group["engine_args"][4:] == [],
        )
        assert all(off) or all(on)
        found.add(all(on))
    assert found == {made["p2p"]["on"]}
    return made["p2p"]["on"]


def make(number="03", **request):
    matrix = machines.machine(number)
    return plan(matrix, machines.alike(matrix.count), tensor_parallel=2, **request)


def test_pcie_is_off_until_a_probe_passed():
    made = make()
    assert switched(made) is False
    assert made["p2p"]["probed"] is False
    proven = make(verdict=verdict_for(made))
    assert switched(proven) is True
    assert proven["p2p"]["probed"] is True
    assert not [line for line in proven["warnings"] if "P2P" in line]


def test_nvlink_is_on_until_a_probe_failed():
    made = make("12")
    assert switched(made) is True
    failed = verdict_for(made, p2p=False, because="P2P is off: it hung.")
    assert switched(make("12", verdict=failed)) is False


def test_one_pcie_group_switches_the_nvlink_groups_off_too():
    matrix = machines.relinked(machines.machine("12"), [(2, 3)], "PHB")
    made = plan(matrix, machines.alike(4), tensor_parallel=2)
    assert [group["worst_link"] for group in made["groups"]] == ["NV12", "PHB"]
    assert switched(made) is False


def test_a_verdict_without_working_collectives_is_a_refusal():
    broken = verdict_for(make(), p2p=False, collectives=False, because="nothing works.")
    with pytest.raises(TopologyError, match="failed with P2P on and off: nothing works"):
        make(verdict=broken)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"driver": "590.1"}, "changed since are driver"),
        ({"firmware": "F2"}, "changed since are firmware"),
        ({"gpus": True}, "changed since are groups"),
    ],
)
def test_a_verdict_does_not_outlive_what_it_was_about(change, words):
    old = verdict_for(make(driver="580.1", firmware="F1"))
    request = {"driver": "580.1", "firmware": "F1"}
    gpus = machines.alike(8)
    if change.pop("gpus", False):
        gpus = machines.alike(8, gpu3={"uuid": "GPU-replaced"})
    made = plan(
        machines.machine("03"), gpus, tensor_parallel=2, verdict=old, **{**request, **change}
    )
    assert switched(made) is False
    assert made["p2p"]["probed"] is False
    assert any(words in line for line in made["warnings"])


def test_a_verdict_of_gloo_is_ignored():
    made = make(verdict=verdict_for(make(), backend="gloo"))
    assert switched(made) is False
    assert any("gloo, which says nothing of GPUs" in line for line in made["warnings"])


@pytest.mark.parametrize("verdict", [{}, {"version": 1}, {"version": 1, "p2p": "yes"}])
def test_a_damaged_verdict_is_refused(verdict):
    with pytest.raises(TopologyError, match="has no valid"):
        make(verdict=verdict)


def test_a_driver_that_reports_no_access_overrules_the_probe():
    status = parse_p2p(machines.text("16b"))
    matrix, gpus = machines.machine("16"), machines.alike(2)
    made = plan(matrix, gpus, peer_status=status)
    assert switched(made) is False
    assert made["p2p"]["because"] == (
        "P2P is off: the driver reports GNS (GPU not supported) between GPU0 and GPU1."
    )
    passed = plan(matrix, gpus, peer_status=status, verdict=verdict_for(made))
    assert switched(passed) is False
    assert passed["p2p"]["probed"] is True


def test_only_pairs_inside_groups_need_access():
    status = [["X" if i == j else "CNS" for j in range(4)] for i in range(4)]
    for i, j in ((0, 1), (2, 3)):
        status[i][j] = status[j][i] = "OK"
    made = plan(machines.machine("12"), machines.alike(4), tensor_parallel=2, peer_status=status)
    assert switched(made) is True


def test_the_operator_overrules_everything():
    failed = verdict_for(make(), p2p=False, because="it hung.")
    forced = make(p2p="on", verdict=failed)
    assert switched(forced) is True
    assert "P2P is forced on although the probe failed: it hung." in forced["warnings"]
    assert switched(make("12", p2p="off")) is False


def test_single_gpus_have_no_switch():
    made = plan(machines.machine("03"), machines.alike(8), tensor_parallel=1, p2p="off")
    for group in made["groups"]:
        assert group["nccl_env"] == {}
        assert group["engine_args"][4:] == []


def test_a_redirecting_bridge_is_reported_for_pairs_that_share_a_group():
    redirects = [
        {"pair": [0, 1], "bridges": ["0000:40:01.1"]},
        {"pair": [0, 4], "bridges": ["0000:40:01.1", "0000:c0:01.1"]},
    ]
    made = make(redirects=redirects)
    assert made["acs"] == redirects[:1]
    assert (
        "ACS at 0000:40:01.1 sends traffic between GPU0 and GPU1 through an IOMMU that translates: "
        "collectives over P2P can hang there." in made["warnings"]
    )
    assert make("12", redirects=redirects)["acs"] == []  # NVLink does not pass the bridges
