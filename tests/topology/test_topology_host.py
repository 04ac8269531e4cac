# SPDX-License-Identifier: Apache-2.0
"""What a host says of itself, with nvidia-smi replaced and /sys and /proc made up."""

import pytest
import topology_machines as machines

from ddtree_topology import host
from ddtree_topology.errors import TopologyError

VERSION = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build\n"


class Smi:
    """nvidia-smi of one machine; records what it was asked."""

    def __init__(self, number, gpus, apps="", p2p="OK"):
        self.number, self.gpus, self.apps, self.p2p = number, gpus, apps, p2p
        self.asked = []

    def __call__(self, command):
        self.asked.append(command[1])
        assert command[0] == "nvidia-smi"
        if command[1:] == ["topo", "-m"]:
            return machines.text(self.number)
        if command[1:] == ["topo", "-p2p", "r"]:
            if self.p2p is None:
                raise TopologyError("`nvidia-smi topo -p2p r` failed with exit status 255: no")
            count = len(self.gpus)
            head = "\t" + "\t".join(f"GPU{i}" for i in range(count)) + "\n"
            return head + "".join(
                f"GPU{i}\t" + "\t".join("X" if i == j else self.p2p for j in range(count)) + "\n"
                for i in range(count)
            )
        if command[1].startswith("--query-gpu="):
            assert command[1] == (
                "--query-gpu=index,name,uuid,memory.total,mig.mode.current,pci.bus_id"
            )
            return "".join(line + "\n" for line in self.gpus)
        assert command[1] == "--query-compute-apps=gpu_uuid,pid,process_name"
        return self.apps


def pair(name="NVIDIA GeForce RTX 3090", mig="[N/A]"):
    return [f"{i}, {name}, GPU-{i}, 24576, {mig}, 00000000:0{i + 1}:00.0" for i in range(2)]


@pytest.fixture
def root(tmp_path):
    for device, node, cpus in (("0000:01:00.0", "0", "0-7"), ("0000:02:00.0", "1", "8-15")):
        folder = tmp_path / "sys/bus/pci/devices" / device
        folder.mkdir(parents=True)
        (folder / "numa_node").write_text(node + "\n")
        (folder / "local_cpulist").write_text(cpus + "\n")
    for path, text in {
        "proc/driver/nvidia/version": VERSION,
        "sys/class/dmi/id/bios_vendor": "ACME",
        "sys/class/dmi/id/bios_version": "F31",
        "sys/devices/system/cpu/online": "0-15",
        "sys/devices/system/node/online": "0-1",
        "proc/77/cgroup": "0::/system.slice/ddtree-vllm@0.service\n",
        "proc/78/cgroup": "0::/user.slice/session-3.scope\n",
    }.items():
        file = tmp_path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return tmp_path


def test_reads_gpus_links_and_places(root):
    found = host.read_host(Smi("10", pair()), str(root))
    assert [(gpu.name, gpu.uuid, gpu.memory_mib, gpu.mig) for gpu in found.gpus] == [
        ("NVIDIA GeForce RTX 3090", "GPU-0", 24576, False),
        ("NVIDIA GeForce RTX 3090", "GPU-1", 24576, False),
    ]
    assert [(gpu.cpus, gpu.numa) for gpu in found.gpus] == [("0-7", (0,)), ("8-15", (1,))]
    assert found.matrix == machines.machine("10")
    assert found.peer_status == (("X", "OK"), ("OK", "X"))
    assert (found.driver, found.firmware) == ("580.159.04", "ACME F31")
    made = host.plan_host(found)
    assert made["groups"][0]["uuids"] == ["GPU-0", "GPU-1"]
    assert made["groups"][0]["cpuset"] == "0-15"
    assert made["fingerprint"] == {
        "groups": [["GPU-0", "GPU-1"]],
        "driver": "580.159.04",
        "firmware": "ACME F31",
    }


def test_a_foreign_process_makes_a_gpu_busy_and_our_own_does_not(root):
    apps = "GPU-0, 77, VLLM::EngineCore\nGPU-1, 78, /usr/bin/python3\n"
    found = host.read_host(Smi("10", pair(), apps), str(root))
    assert [gpu.busy for gpu in found.gpus] == ["", "python3 (pid 78)"]
    found = host.read_host(Smi("10", pair(), apps), str(root), own_cgroups=["session-3"])
    assert [gpu.busy for gpu in found.gpus] == ["VLLM::EngineCore (pid 77)", ""]


def test_the_plan_is_the_same_while_our_instances_run(root):
    idle = host.plan_host(host.read_host(Smi("10", pair()), str(root)))
    apps = "GPU-0, 77, VLLM::EngineCore\nGPU-1, 77, VLLM::EngineCore\n"
    assert host.plan_host(host.read_host(Smi("10", pair(), apps), str(root))) == idle


def test_one_gpu_needs_no_matrix(root):
    smi = Smi("29", ["0, NVIDIA H200, GPU-0, 143771, Disabled, 00000000:01:00.0"])
    found = host.read_host(smi, str(root))
    assert "topo" not in smi.asked
    assert host.plan_host(found)["groups"][0]["cpuset"] == "0-7"


def test_mig_is_seen(root):
    found = host.read_host(Smi("10", pair(mig="Enabled")), str(root))
    assert all(gpu.mig for gpu in found.gpus)


def test_a_node_of_minus_one_is_unknown_unless_there_is_only_one(root):
    file = root / "sys/bus/pci/devices/0000:01:00.0/numa_node"
    file.write_text("-1\n")
    assert host.read_gpus(Smi("10", pair()), str(root))[0].numa is None
    (root / "sys/devices/system/node/online").write_text("0\n")
    assert host.read_gpus(Smi("10", pair()), str(root))[0].numa == (0,)


def test_peer_access_that_cannot_be_asked_is_said(root):
    made = host.plan_host(host.read_host(Smi("09", pair(), p2p=None), str(root)))
    assert made["warnings"][0].startswith("Whether the driver reports peer access is not known")


def test_no_peer_access_switches_p2p_off(root):
    made = host.plan_host(host.read_host(Smi("10", pair(), p2p="CNS"), str(root)))
    assert made["p2p"]["on"] is False
    assert "CNS (chipset not supported)" in made["p2p"]["because"]


@pytest.mark.parametrize(
    ("lines", "words"),
    [([], "lists no GPU"), (["0, H200"], "answered '0, H200', not 6 values")],
)
def test_answers_in_another_form_are_refused(lines, words, root):
    with pytest.raises(TopologyError, match=words):
        host.read_host(Smi("10", lines), str(root))


def test_a_gpu_that_vanishes_between_two_answers_is_refused(root):
    found = host.read_host(Smi("13", pair()), str(root))
    with pytest.raises(TopologyError, match="shows 4 GPUs and the inventory lists 2"):
        host.plan_host(found)


def test_a_missing_command_is_refused_with_advice():
    with pytest.raises(TopologyError, match="install the NVIDIA driver, or ask for cpu_only"):
        host.run_command(["no-such-nvidia-smi"])


def test_a_failing_command_is_refused_with_its_words(tmp_path):
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'NVIDIA-SMI has failed: driver mismatch' >&2\nexit 9\n")
    program.chmod(0o755)
    with pytest.raises(TopologyError, match="exit status 9: NVIDIA-SMI has failed: driver mism"):
        host.run_command([str(program), "-L"])


def test_a_hanging_command_is_refused(tmp_path, monkeypatch):
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\nexec sleep 30\n")
    program.chmod(0o755)
    monkeypatch.setattr(host, "_TIMEOUT_S", 0.1)
    with pytest.raises(TopologyError, match=r"did not answer within 0.1 s: the driver hangs"):
        host.run_command([str(program)])
