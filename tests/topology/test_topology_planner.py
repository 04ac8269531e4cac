# SPDX-License-Identifier: Apache-2.0
"""Plans of real machines by value, and rules that hold for any machine."""

import json
import random
from itertools import combinations

import pytest
import topology_machines as machines
from test_topology_partition import every_division, score

from ddtree_topology import links
from ddtree_topology.errors import TopologyError
from ddtree_topology.inventory import Gpu
from ddtree_topology.planner import SIZES, plan, plan_cpu

ALL8 = [[0, 1, 2, 3, 4, 5, 6, 7]]
HALVES = [[0, 1, 2, 3], [4, 5, 6, 7]]
PAIRS = [[0, 1], [2, 3], [4, 5], [6, 7]]

# number: groups, worst link, cpusets, memory nodes, P2P on before any probe
LATENCY = {
    "01": (ALL8, "NV18", ["0-191"], ["0-1"], True),
    "03": (HALVES, "NODE", ["0-63,128-191", "64-127,192-238"], ["0", "1"], False),
    "05": (ALL8, "NV18", ["0-191"], ["0-1"], True),
    "06": ([[0, 1]], "PHB", ["0-13"], ["0"], False),
    "07": (HALVES, "SYS", ["0-55,112-167", "56-111,168-223"], ["0", "1"], False),
    "09": ([[0, 1]], "PHB", ["0-15"], ["0"], False),
    "10": ([[0, 1]], "NV4", ["0-23"], ["0"], True),
    "12": ([[0, 1], [2, 3]], "NV12", ["0-47", "48-95"], ["0-1", "2-3"], True),
    "13": ([[0, 1, 2, 3]], "NV6", ["4-7,12-15,20-23,28-31"], ["1,3,5,7"], True),
    "14": (ALL8, "NV18", ["0-223"], ["0-1"], True),
    "16": ([[0, 1]], "PHB", ["0-63"], ["0"], False),
    "17": (HALVES, "NV1", ["0-95", "0-95"], [None, None], True),
    "19": ([[0, 1, 2, 3]], "NV4", ["0-63"], ["0-3"], True),
    "21": ([[0, 1]], "NV12", [None], [None], True),
    "22": ([[0]], None, ["32-63,96-127"], ["1"], False),
    "23": (ALL8, "NV12", ["0-95"], ["0-1"], True),
    "26": ([[0, 1, 2, 3]], "NODE", ["0-31"], ["0"], False),
    "27": ([[0, 1]], "NODE", ["0-15"], ["0"], False),
    "29": ([[0]], None, ["0-15"], ["0"], False),
}
# number, size: groups and worst link
ASKED_FOR = {
    ("01", 4): (HALVES, "NV18"),
    ("01", 2): (PAIRS, "NV18"),
    ("03", 2): (PAIRS, "PIX"),
    ("03", 8): (ALL8, "SYS"),
    ("07", 2): (PAIRS, "SYS"),
    ("07", 8): (ALL8, "SYS"),
    ("12", 4): ([[0, 1, 2, 3]], "SYS"),
    ("17", 2): ([[0, 3], [1, 2], [4, 7], [5, 6]], "NV2"),
    ("17", 8): (ALL8, "SYS"),
    ("13", 2): ([[0, 1], [2, 3]], "NV6"),
    ("26", 2): ([[0, 1], [2, 3]], "NODE"),
    ("23", 1): ([[gpu] for gpu in range(8)], None),
}
P2P_OFF_NCCL = {"NCCL_P2P_DISABLE": "1"}
P2P_OFF_VLLM = {
    "VLLM_ALLREDUCE_USE_FLASHINFER": "0",
    "VLLM_ALLREDUCE_USE_FLASHINFER_PCIE_IPC": "0",
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
    "VLLM_USE_NCCL_SYMM_MEM": "0",
}
P2P_OFF_ARGUMENTS = [
    "--disable-custom-all-reduce",
    "--compilation-config.pass_config.fuse_allreduce_rms=false",
]


def groups_of(made):
    return [group["gpus"] for group in made["groups"]]


@pytest.mark.parametrize("number", LATENCY)
def test_plan_of_a_real_machine(number):
    groups, worst, cpusets, nodes, p2p = LATENCY[number]
    made = plan(machines.machine(number))
    assert groups_of(made) == groups
    size = len(groups[0])
    assert made["tensor_parallel"] == size
    assert made["excluded"] == {}
    assert made["p2p"]["on"] is p2p
    off = size > 1 and not p2p
    for number_, group in enumerate(made["groups"]):
        assert group == {
            "instance": str(number_),
            "gpus": groups[number_],
            "uuids": [],
            "tensor_parallel": size,
            "worst_link": worst,
            "cpuset": cpusets[number_],
            "memory_node": nodes[number_],
            "env": {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", **(P2P_OFF_VLLM if off else {})},
            "nccl_env": P2P_OFF_NCCL if off else {},
            "engine_args": [
                "--tensor-parallel-size",
                str(size),
                "--gpu-memory-utilization",
                "0.92",
                *(P2P_OFF_ARGUMENTS if off else []),
            ],
            "port": 8000 + number_,
            "cache_dir": f"/var/cache/ddtree-vllm/{number_}",
            "cache_key": group["cache_key"],
        }


@pytest.mark.parametrize(("number", "size"), ASKED_FOR)
def test_plan_of_a_size_that_was_asked_for(number, size):
    groups, worst = ASKED_FOR[number, size]
    made = plan(machines.machine(number), tensor_parallel=size)
    assert groups_of(made) == groups
    assert {group["worst_link"] for group in made["groups"]} == {worst}
    assert made["why"][1] == f"TP {size} was asked for."


def test_same_numa_pair_ignored():
    # Fixture 07 has SYS between all GPUs; with the sockets' slots alternating, PCI order alone
    # would pair across them.
    matrix = machines.reordered(machines.machine("07"), [0, 4, 1, 5, 2, 6, 3, 7])
    assert groups_of(plan(matrix, tensor_parallel=2)) == [[0, 2], [1, 3], [4, 6], [5, 7]]
    latency = plan(matrix)
    assert groups_of(latency) == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert [group["memory_node"] for group in latency["groups"]] == ["0", "1"]


def test_links_come_before_numa_nodes():
    # The bridges of fixture 12 cross its NUMA nodes, and are used all the same.
    assert groups_of(plan(machines.machine("12"), tensor_parallel=2)) == [[0, 1], [2, 3]]


def test_says_why():
    made = plan(machines.machine("03"), machines.alike(8), model_memory_mib=62000)
    assert made["why"] == [
        "8 of 8 GPUs may serve (NVIDIA H200, 143771 MiB).",
        "TP 4 for latency: the largest size whose groups are all linked by PCIe inside one socket.",
        "P2P is off, not proven: over PCIe it can hang or corrupt data although the driver reports "
        "it; a passed `ddtree-topology probe` turns it on.",
    ]
    assert [(choice["tensor_parallel"], choice["why"]) for choice in made["choices"]] == [
        (1, "a request is served faster by more GPUs"),
        (2, "a request is served faster by more GPUs"),
        (4, "the largest size whose groups are all linked by PCIe inside one socket"),
        (8, "a group would be linked across NUMA nodes"),
    ]


def test_latency_and_throughput_divide_the_same_host_differently():
    # Four RTX 3090 with an INT4 Qwen3.6-27B: two replicas of two, or one of four.
    gpus = machines.alike(4, "NVIDIA GeForce RTX 3090", 24576)
    matrix = machines.machine("26")
    latency = plan(matrix, gpus, model_memory_mib=27000)
    throughput = plan(matrix, gpus, model_memory_mib=27000, objective="throughput")
    assert groups_of(latency) == [[0, 1, 2, 3]]
    assert groups_of(throughput) == [[0, 1], [2, 3]]
    assert throughput["choices"][0]["why"] == (
        "the model needs 27000 MiB a GPU and 22609 MiB are usable"
    )


def test_memory_can_force_a_group_across_sockets():
    gpus = machines.alike(8, "NVIDIA GeForce RTX 4090", 24564)
    made = plan(machines.machine("07"), gpus, model_memory_mib=100000)
    assert groups_of(made) == ALL8


def test_a_model_that_fits_nowhere_is_refused():
    gpus = machines.alike(2, "NVIDIA GeForce RTX 3090", 24576)
    with pytest.raises(TopologyError, match="over 2 GPUs it needs 31000 MiB a GPU, and 22609 MiB"):
        plan(machines.machine("09"), gpus, model_memory_mib=62000)
    with pytest.raises(TopologyError, match=r"does not fit at tensor_parallel=1.*=2 would do"):
        plan(machines.machine("09"), gpus, model_memory_mib=40000, tensor_parallel=1)


def test_what_was_not_checked_is_said():
    assert plan(machines.machine("21"))["warnings"] == [
        "Only the matrix is known: names, memory, MIG, foreign processes and UUIDs were not "
        "checked.",
        "model_memory_mib is not given: whether the model fits was not checked.",
        "P2P is not proven: run `ddtree-topology probe`.",
        "Group 0 (GPU0, GPU1) is not pinned in full: the CPUs and memory nodes near its GPUs are "
        "not known; on the host itself sysfs tells.",
    ]
    known = plan(machines.machine("10"), machines.alike(2), model_memory_mib=62000, p2p="off")
    assert known["warnings"] == []


def test_sysfs_is_believed_before_the_matrix():
    gpus = machines.alike(
        2, gpu0={"cpus": "0-7", "numa": (0,)}, gpu1={"cpus": "8-15", "numa": (1,)}
    )
    (group,) = plan(machines.machine("21"), gpus)["groups"]
    assert (group["cpuset"], group["memory_node"]) == ("0-15", "0-1")


def test_a_gpu_lost_its_nvlink():
    pairs = [(5, peer) for peer in range(8) if peer != 5]
    matrix = machines.relinked(machines.machine("01"), pairs, "NODE")
    made = plan(matrix, machines.alike(8), tensor_parallel=4)
    assert list(made["excluded"]) == ["4", "5", "6", "7"]
    assert made["excluded"]["5"].startswith("NVLink lost: reaches GPU0, GPU1")
    assert made["excluded"]["6"] == "left over: 7 GPUs make 1 group of 4"
    assert groups_of(made) == [[0, 1, 2, 3]]
    assert made["warnings"][0].startswith("GPU5 is degraded: NVLink lost")

    kept = plan(matrix, machines.alike(8), tensor_parallel=8, allow_degraded=True)
    assert groups_of(kept) == ALL8
    assert kept["groups"][0]["worst_link"] == "NODE"
    assert kept["warnings"][0].startswith("GPU5 is degraded: NVLink lost")


def test_a_busy_gpu_still_witnesses_the_mesh():
    pairs = [(0, peer) for peer in range(1, 4)]
    matrix = machines.relinked(machines.machine("13"), pairs, "SYS")
    made = plan(matrix, machines.alike(4, gpu1={"busy": "python3 (pid 4)"}))
    assert sorted(made["excluded"]) == ["0", "1"]
    assert made["excluded"]["1"] == "in use by python3 (pid 4)"


def test_seven_gpus_are_divided_without_rest_and_the_other_choice_is_named():
    made = plan(
        machines.machine("01"), machines.alike(8, gpu2={"busy": "x"}), model_memory_mib=62000
    )
    assert made["tensor_parallel"] == 1
    assert made["choices"][2]["why"] == "does not divide 7 GPUs"
    assert made["warnings"][0] == (
        "7 GPUs are not a multiple of 4: tensor_parallel=4 would serve a request faster and leave "
        "3 GPUs idle."
    )


def test_gpus_stay_idle_where_no_fitting_size_divides_them():
    gpus = machines.alike(8, "NVIDIA GeForce RTX 4090", 24564, gpu7={"busy": "x"})
    made = plan(machines.machine("03"), gpus, model_memory_mib=40000, objective="throughput")
    assert groups_of(made) == [[0, 1], [2, 3], [4, 5]]
    assert made["excluded"]["6"] == "left over: 7 GPUs make 3 groups of 2"


def test_a_gpu_under_mig_is_excluded():
    made = plan(machines.machine("01"), machines.alike(8, gpu0={"mig": True}), tensor_parallel=2)
    assert made["excluded"]["0"] == "MIG is on (turn it off with `nvidia-smi -i 0 -mig 0`)"
    # GPU3 is left over, rather than paired across the sockets.
    assert groups_of(made) == [[1, 2], [4, 5], [6, 7]]


def test_mixed_gpus_are_refused_one_group():
    other = {"name": "NVIDIA GeForce RTX 3090", "memory_mib": 24576}
    gpus = machines.alike(4, "NVIDIA GeForce RTX 4090", 24564, gpu1=other)
    made = plan(machines.machine("26"), gpus, tensor_parallel=2)
    assert groups_of(made) == [[0, 2]]
    assert made["excluded"]["1"] == (
        "other hardware (NVIDIA GeForce RTX 3090, 24576 MiB) than the GPUs that serve"
    )
    assert made["groups"][0]["env"]["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    with pytest.raises(TopologyError, match="needs 4 GPUs that are alike and free; there are 3"):
        plan(machines.machine("26"), gpus, tensor_parallel=4)
    pair = [gpus[0], gpus[1]]
    with pytest.raises(TopologyError, match="needs 2 GPUs that are alike and free; there is 1"):
        plan(machines.machine("06"), pair, tensor_parallel=2)


def test_same_name_with_other_memory_is_mixed():
    gpus = machines.alike(2, gpu1={"memory_mib": 70000})
    assert groups_of(plan(machines.machine("10"), gpus)) == [[0]]


def test_a_large_gpu_serves_rather_than_two_small_ones():
    small = {"name": "NVIDIA T400", "memory_mib": 4096}
    gpus = machines.alike(4, gpu1=small, gpu2=small, gpu3=small)
    assert groups_of(plan(machines.machine("26"), gpus)) == [[0]]


def test_no_gpu_left_is_refused_with_every_reason():
    gpus = machines.alike(2, gpu0={"mig": True}, gpu1={"busy": "Xorg (pid 9)"})
    with pytest.raises(
        TopologyError, match=r"GPU0 \(MIG is on .*GPU1 \(in use by Xorg \(pid 9\)\)"
    ):
        plan(machines.machine("10"), gpus)


def test_a_vanished_gpu_is_refused():
    with pytest.raises(TopologyError, match="shows 8 GPUs and the inventory lists 7"):
        plan(machines.machine("01"), machines.alike(7))


def test_gpus_out_of_pci_order_are_refused():
    gpus = machines.alike(2, gpu0={"pci_bus_id": "00000000:C1:00.0"})
    with pytest.raises(TopologyError, match="not in the order of their PCI addresses"):
        plan(machines.machine("10"), gpus)


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        ({"tensor_parallel": 3}, "tensor_parallel is 0"),
        ({"tensor_parallel": 8}, "needs 8 GPUs"),
        ({"objective": "fast"}, "objective is latency or throughput"),
        ({"p2p": "maybe"}, "p2p is auto, on or off"),
        ({"model_memory_mib": -1}, "model_memory_mib is 0"),
        ({"memory_utilization": 1.5}, "memory_utilization is above 0"),
        ({"first_port": 0}, "first_port is 1"),
    ],
)
def test_a_bad_request_is_refused(request_, words):
    with pytest.raises(TopologyError, match=words):
        plan(machines.machine("10"), **request_)


def test_a_plan_is_plain_json_and_repeatable():
    first = plan(machines.machine("03"), machines.alike(8), model_memory_mib=62000)
    second = plan(machines.machine("03"), machines.alike(8), model_memory_mib=62000)
    assert json.dumps(first) == json.dumps(second)
    assert json.loads(json.dumps(first)) == first
    assert first["gpus"]["4"] == {
        "links": ["SYS", "SYS", "SYS", "SYS", "X", "PIX", "NODE", "NODE"],
        "cpus": "64-127,192-238",
        "numa": [1],
        "name": "NVIDIA H200",
        "uuid": "GPU-00000004",
        "memory_mib": 143771,
        "pci_bus_id": "00000000:05:00.0",
    }


def test_ports_caches_and_keys_differ_between_instances():
    made = plan(
        machines.machine("03"),
        machines.alike(8),
        tensor_parallel=2,
        first_port=9000,
        cache_root="/srv/cache/",
        driver="580.1",
    )
    assert [group["port"] for group in made["groups"]] == [9000, 9001, 9002, 9003]
    assert [group["cache_dir"] for group in made["groups"]] == [
        f"/srv/cache/{number}" for number in range(4)
    ]
    assert len({group["cache_key"] for group in made["groups"]}) == 4
    newer = plan(machines.machine("03"), machines.alike(8), tensor_parallel=2, driver="590.1")
    # A new driver must not find the old one's peer access cache.
    assert newer["groups"][0]["cache_key"] != made["groups"][0]["cache_key"]


def test_the_engine_is_told_the_part_of_the_memory_that_was_planned_with():
    made = plan(machines.machine("06"), memory_utilization=0.8, tensor_parallel=2)
    given = made["groups"][0]["engine_args"]
    assert given[given.index("--gpu-memory-utilization") + 1] == "0.8"


def test_a_host_without_gpus_serves_only_when_asked_to():
    made = plan_cpu("0-1", "0", first_port=8100)
    assert made["groups"] == [
        {
            "instance": "0",
            "gpus": [],
            "uuids": [],
            "tensor_parallel": 1,
            "worst_link": None,
            "cpuset": "0-1",
            "memory_node": "0",
            "env": {},
            "nccl_env": {},
            "engine_args": ["--tensor-parallel-size", "1"],
            "port": 8100,
            "cache_dir": "/var/cache/ddtree-vllm/0",
            "cache_key": made["groups"][0]["cache_key"],
        }
    ]
    whole = plan(machines.machine("29"))
    assert made.keys() == whole.keys()
    assert made["groups"][0].keys() == whole["groups"][0].keys()


def random_gpus(count, rng):
    kinds = [("A", 24576), ("A", 24576), ("A", 24576), ("B", 24576), ("A", 40960)]
    gpus = []
    for index in range(count):
        name, memory = rng.choice(kinds)
        gpus.append(
            Gpu(
                index,
                name=name,
                memory_mib=memory,
                uuid=f"GPU-{index}",
                mig=rng.random() < 0.1,
                busy="x" if rng.random() < 0.1 else "",
            )
        )
    return gpus


def test_rules_that_hold_for_any_machine(seed):
    rng = random.Random(seed)
    planned = refused = 0
    for _ in range(400):
        count = rng.randint(1, 8)
        matrix, gpus = machines.random_matrix(count, rng), random_gpus(count, rng)
        wanted = rng.choice([0, 0, 1, 2, 4, 8])
        memory = rng.choice([0, 0, 20000, 40000, 80000])
        try:
            made = plan(
                matrix,
                gpus,
                tensor_parallel=wanted,
                model_memory_mib=memory,
                objective=rng.choice(["latency", "throughput"]),
            )
        except TopologyError:
            refused += 1
            continue
        planned += 1
        groups = groups_of(made)
        members = [gpu for group in groups for gpu in group]
        excluded = [int(index) for index in made["excluded"]]
        # Every GPU is in one group or excluded for a reason.
        assert sorted(members + excluded) == list(range(count))
        assert all(made["excluded"].values())
        size = made["tensor_parallel"]
        assert size in SIZES
        assert {len(group) for group in groups} == {size}
        assert wanted in (0, size)
        assert len({gpus[gpu].kind for gpu in members}) == 1
        assert not any(gpus[gpu].mig or gpus[gpu].busy for gpu in members)
        assert memory / size <= 0.92 * gpus[members[0]].memory_mib
        # No division of the GPUs that may serve has a better worst link.
        idle = [gpu for gpu in excluded if made["excluded"][str(gpu)].startswith("left over")]
        usable = sorted(members + idle)
        best = max(
            score(division, matrix) for division in every_division(usable, size, len(usable) % size)
        )
        assert score(groups, matrix) == best
        for group in made["groups"]:
            ranks = [links.rank(matrix.links[i][j]) for i, j in combinations(group["gpus"], 2)]
            assert group["worst_link"] == (links.link_of(min(ranks)) if ranks else None)
            assert group["uuids"] == [f"GPU-{gpu}" for gpu in group["gpus"]]
    assert planned > 100
    assert refused > 20
