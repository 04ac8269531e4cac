# SPDX-License-Identifier: Apache-2.0
"""Reading `nvidia-smi topo -m`: what is read by value, and what must be refused."""

import pytest
import topology_machines as machines

from ddtree_topology.errors import TopologyError
from ddtree_topology.matrix import parse_matrix, parse_p2p


def full_mesh(count, link):
    return tuple(tuple("X" if i == j else link for j in range(count)) for i in range(count))


# number: links, or the link of every pair; CPU affinity and NUMA nodes of each GPU
SOCKETS = [(0,)] * 4 + [(1,)] * 4
EXPECTED = {
    "01": (full_mesh(8, "NV18"), ["0-47,96-143"] * 4 + ["48-95,144-191"] * 4, SOCKETS),
    "05": (full_mesh(8, "NV18"), ["0-47,96-143"] * 4 + ["48-95,144-191"] * 4, SOCKETS),
    "06": (full_mesh(2, "PHB"), ["0-13"] * 2, [(0,)] * 2),
    "07": (full_mesh(8, "SYS"), ["0-55,112-167"] * 4 + ["56-111,168-223"] * 4, SOCKETS),
    "09": (full_mesh(2, "PHB"), ["0-15"] * 2, [(0,)] * 2),
    "10": (full_mesh(2, "NV4"), ["0-23"] * 2, [(0,)] * 2),
    "12": (
        (
            ("X", "NV12", "SYS", "SYS"),
            ("NV12", "X", "SYS", "SYS"),
            ("SYS", "SYS", "X", "NV12"),
            ("SYS", "SYS", "NV12", "X"),
        ),
        ["0-23", "24-47", "48-71", "72-95"],
        [(0,), (1,), (2,), (3,)],
    ),
    "13": (
        full_mesh(4, "NV6"),
        ["6,14,22,30", "4,12,20,28", "7,15,23,31", "5,13,21,29"],
        [(3,), (1,), (7,), (5,)],
    ),
    "14": (full_mesh(8, "NV18"), ["0-55,112-167"] * 4 + ["56-111,168-223"] * 4, SOCKETS),
    "16": (full_mesh(2, "PHB"), ["0-63"] * 2, [(0,)] * 2),
    "19": (
        full_mesh(4, "NV4"),
        ["24-31,56-63", "16-23,48-55", "8-15,40-47", "0-7,32-39"],
        [(3,), (2,), (1,), (0,)],
    ),
    "21": (full_mesh(2, "NV12"), [None] * 2, [None] * 2),
    "22": (full_mesh(1, ""), ["32-63,96-127"], [(1,)]),
    "23": (full_mesh(8, "NV12"), ["0-23,48-71"] * 4 + ["24-47,72-95"] * 4, SOCKETS),
    "26": (full_mesh(4, "NODE"), ["0-31"] * 4, [(0,)] * 4),
    "27": (full_mesh(2, "NODE"), ["0-15"] * 2, [(0,)] * 2),
    "29": (full_mesh(1, ""), ["0-15"], [(0,)]),
}


@pytest.mark.parametrize("number", EXPECTED)
def test_reads_the_matrix_of_a_real_machine(number):
    table, cpus, numa = EXPECTED[number]
    read = machines.machine(number)
    assert read.links == table
    assert list(read.cpus) == cpus
    assert list(read.numa) == numa
    assert read.warnings == ()


def test_reads_through_ansi_codes():
    read = machines.machine("03")
    assert "\x1b" in machines.text("03")
    assert read.links[0] == ("X", "PIX", "NODE", "NODE", "SYS", "SYS", "SYS", "SYS")
    assert read.links[5] == ("SYS", "SYS", "SYS", "SYS", "PIX", "X", "NODE", "NODE")
    assert read.cpus[4] == "64-127,192-238"
    assert read.numa[7] == (1,)


def test_reads_a_machine_without_a_numa_column():
    read = machines.machine("17")
    assert read.links[0] == ("X", "NV1", "NV1", "NV2", "SYS", "SYS", "NV2", "SYS")
    assert read.cpus == ("0-95",) * 8
    assert read.numa == (None,) * 8


def test_every_fixture_is_read_or_refused_here():
    numbers = {file.name.split("-")[0] for file in machines.FIXTURES.glob("*.txt")}
    assert numbers == {*EXPECTED, "03", "17", "16b", "25"}


def test_reads_lists_and_ranges_of_numa_nodes():
    read = parse_matrix("\tGPU0\tCPU Affinity\tNUMA Affinity\nGPU0\t X \t0-3,8\t0-2,5\n")
    assert read.cpus == ("0-3,8",)
    assert read.numa == ((0, 1, 2, 5),)


def test_a_blank_cell_between_tabs_is_unknown():
    header = "\tGPU0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\n"
    assert parse_matrix(header + "GPU0\t X \t\t1\t\tN/A\n").numa == ((1,),)
    assert parse_matrix(header + "GPU0\t X \t\t1\t\tN/A\n").cpus == (None,)
    assert parse_matrix(header + "GPU0\t X \t0-7\tN/A\t\tN/A\n").numa == (None,)


def test_a_missing_cell_without_tabs_is_never_guessed():
    # "0-7" may be a list of CPUs or a range of nodes.
    read = parse_matrix("  GPU0 CPU Affinity NUMA Affinity GPU NUMA ID\nGPU0  X   0-7   N/A\n")
    assert read.cpus == (None,)
    assert read.numa == (None,)


def test_an_unreadable_affinity_is_reported():
    read = parse_matrix("\tGPU0\tCPU Affinity\tNUMA Affinity\nGPU0\t X \t7-3\t0\n")
    assert read.cpus == (None,)
    assert read.numa == ((0,),)
    assert read.warnings == ("GPU0: CPU affinity '7-3' is not readable and was left out.",)


def test_the_old_name_of_sys_is_understood():
    assert parse_matrix("\tGPU0\tGPU1\nGPU0\t X \tSOC\nGPU1\tSOC\t X\n").links[0] == ("X", "SYS")


def test_text_before_the_header_is_passed_over():
    text = "$ nvidia-smi topo -m\n" + machines.text("06")
    assert parse_matrix(text) == machines.machine("06")


REFUSED = {
    "tabs lost in the header": (machines.text("25"), "NIC8NIC9"),
    "tabs lost in a NIC column": (
        machines.text("25").replace("NIC8NIC9", "NIC8\tNIC9"),
        "row GPU4 has 'NODENODE'",
    ),
    "peer access instead of links": (machines.text("16b"), "topo -p2p"),
    "not a matrix": ("No devices were found\n", "no header line"),
    "empty": ("", "no header line"),
    "a row is missing": (
        "\n".join(machines.text("07").splitlines()[:6]),
        "names 8 GPUs and 5 rows follow",
    ),
    "a row is there twice": (
        machines.text("06").replace("GPU1    PHB", "GPU0     X      PHB     0-13  0\nGPU1    PHB"),
        "row GPU0 stands where GPU1 belongs",
    ),
    "more rows than columns": (
        machines.text("06") + "GPU2    PHB      X      0-13            0\n",
        "row GPU2 stands where no GPU belongs",
    ),
    "a row is cut short": ("\tGPU0\tGPU1\nGPU0\t X\nGPU1\tPHB\t X\n", "row GPU0 has 1 of 2 cells"),
    "not symmetric": (
        "\tGPU0\tGPU1\nGPU0\t X \tPHB\nGPU1\tPIX\t X\n",
        "GPU1 to GPU0 reads PIX, GPU0 to GPU1 reads PHB",
    ),
    "GPU cells run together": (
        "\tGPU0\tGPU1\tGPU2\nGPU0\tX\tNV18NV18\nGPU1\tNV18\tX\tNV18\nGPU2\tNV18\tNV18\tX\n",
        "GPU0 to GPU1 reads 'NV18NV18'",
    ),
    "header cells run together": ("\tGPU0GPU1\nGPU0\tX\tPHB\nGPU1\tPHB\tX\n", "'GPU0GPU1'"),
    "a header cell is missing": ("\tGPU0\tGPU2\nGPU0\tX\tPHB\nGPU1\tPHB\tX\n", "GPU2 where GPU1"),
    "no diagonal": ("\tGPU0\tGPU1\nGPU0\tPHB\tPHB\nGPU1\tPHB\tX\n", "GPU0 to GPU0 reads 'PHB'"),
    "no such link": ("\tGPU0\tGPU1\nGPU0\tX\tNV0\nGPU1\tNV0\tX\n", "reads 'NV0'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refuses_in_a_sentence(case):
    text, words = REFUSED[case]
    with pytest.raises(TopologyError) as refusal:
        parse_matrix(text)
    assert words in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_a_second_matrix_is_not_read():
    read = machines.machine("27")
    assert read.links == full_mesh(2, "NODE")
    assert "NS" in machines.text("27")


def test_reads_peer_access():
    assert parse_p2p(machines.text("16b")) == (("X", "GNS"), ("GNS", "X"))
    both = machines.text("27")
    assert parse_p2p(both[both.rindex("GPU0 GPU1") :]) == (("X", "NS"), ("NS", "X"))


def test_refuses_links_where_peer_access_belongs():
    with pytest.raises(TopologyError, match="reads 'PHB', which `nvidia-smi topo -p2p r` does not"):
        parse_p2p(machines.text("06"))
