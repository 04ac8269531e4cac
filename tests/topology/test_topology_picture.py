# SPDX-License-Identifier: Apache-2.0
"""Pictures of plans."""

import re
import xml.etree.ElementTree as ET

import pytest
import topology_machines as machines

from ddtree_topology import picture
from ddtree_topology.planner import plan, plan_cpu

SVG = "{http://www.w3.org/2000/svg}"


def test_the_table_of_two_pairs():
    made = plan(machines.machine("12"), machines.alike(4), model_memory_mib=62000)
    assert picture.table(made).splitlines()[:12] == [
        "4 x NVIDIA H200: 2 instances of TP 2, for latency",
        "",
        "          GPU0   GPU1   GPU2   GPU3",
        " 0 GPU0    ·    [NV12]  SYS    SYS",
        " 0 GPU1  [NV12]   ·     SYS    SYS",
        "",
        " 1 GPU2   SYS    SYS     ·    [NV12]",
        " 1 GPU3   SYS    SYS   [NV12]   ·",
        "",
        "instance 0: GPU 0 1, worst link NV12, CPUs 0-47, memory node 0-1, port 8000",
        "instance 1: GPU 2 3, worst link NV12, CPUs 48-95, memory node 2-3, port 8001",
        "",
    ]


def test_excluded_gpus_come_last_with_their_reason():
    made = plan(machines.machine("01"), machines.alike(8, gpu0={"mig": True}), tensor_parallel=2)
    lines = picture.table(made).splitlines()
    labels = [line.split()[1] for line in lines if re.match(r" ?[\d-]+ GPU\d", line)]
    assert labels == ["GPU1", "GPU2", "GPU4", "GPU5", "GPU6", "GPU7", "GPU0", "GPU3"]
    assert "GPU0 excluded: MIG is on (turn it off with `nvidia-smi -i 0 -mig 0`)" in lines


def test_colour_adds_only_escape_codes():
    made = plan(machines.machine("03"))
    coloured = picture.table(made, colour=True)
    assert "\x1b[36m[PIX]" in coloured.replace(" ", "")
    bare = re.sub(r"\x1b\[\d+m", "", coloured)
    assert [line.rstrip() for line in bare.splitlines()] == picture.table(made).splitlines()


@pytest.mark.parametrize("number", ["01", "03", "12", "17", "21", "29"])
def test_the_svg_shows_every_link_and_group(number):
    matrix = machines.machine(number)
    made = plan(matrix)
    document = ET.fromstring(picture.svg(made))
    texts = [element.text for element in document.iter(f"{SVG}text")]
    names = [f"GPU{gpu}" for gpu in range(matrix.count)]
    assert all(texts.count(name) == 2 for name in names)
    cells = [link for row in matrix.links for link in row if link != "X"]
    for link in set(cells):
        assert texts.count(link) == cells.count(link) + 1  # and once in the legend
    outlines = [e for e in document.iter(f"{SVG}rect") if e.get("stroke-width") == "3"]
    assert len(outlines) == len(made["groups"])
    assert document.find(f"{SVG}title").text == texts[0]


def test_names_are_escaped():
    made = plan(machines.machine("29"), machines.alike(1, "<GPU> & more"))
    assert "<GPU>" not in picture.svg(made)
    assert "1 x &lt;GPU&gt; &amp; more" in picture.svg(made)


def test_a_host_without_gpus_can_be_drawn():
    made = plan_cpu("0-1", "0")
    assert picture.table(made).startswith("CPU only, 1 instance\n")
    assert ET.fromstring(picture.svg(made)).find(f"{SVG}title").text == "CPU only, 1 instance"
