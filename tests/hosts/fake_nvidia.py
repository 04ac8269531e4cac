# SPDX-License-Identifier: Apache-2.0
"""GPUs for test hosts that have none: packages whose programs replay recorded fixtures.

The packages are Debian packages, so that dpkg's holds are real; the services are systemd's. What is
not real is the hardware and what speaks to it: fake_nvidia/.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from lab_hosts import ROOT, Lab

from ddtree_topology.acs import sysfs_address
from ddtree_topology.matrix import parse_matrix

HERE = Path(__file__).parent / "fake_nvidia"
TOPOLOGIES = ROOT / "tests/topology/fixtures"
QUERY = ROOT / "tests/health/fixtures/q-1x-h200-driver580.txt"
DRIVER = "580.159.04"
BINARIES = "usr/bin"
UNITS = "lib/systemd/system"
LIBRARIES = "usr/lib/x86_64-linux-gnu"
# What loading a kernel module would do.
LOAD = "systemctl daemon-reload && systemctl enable --quiet --now fake-nvidia.service"


@dataclass(frozen=True)
class Machine:
    """A machine by the recording of its links.

    Attributes:
        matrix: file of tests/topology/fixtures.
        nvswitch: it has NVSwitches.
    """

    matrix: str
    name: str
    memory_mib: int
    power_w: tuple[int, int]
    compute_cap: str
    nvswitch: bool = False

    @property
    def topology(self) -> str:
        return (TOPOLOGIES / self.matrix).read_text()

    def gpus(self) -> list[dict]:
        count = len(parse_matrix(self.topology).links)
        return [
            {
                "index": index,
                "name": self.name,
                "uuid": f"GPU-{index:08x}-0000-4000-8000-{self.memory_mib:012d}",
                "memory_mib": self.memory_mib,
                "pci_bus_id": f"00000000:{0x10 + index:02X}:00.0",
                "compute_cap": self.compute_cap,
                "power_min_w": self.power_w[0],
                "power_max_w": self.power_w[1],
            }
            for index in range(count)
        ]


NVSWITCH = Machine(
    "01-8x-hopper-sxm-nvswitch-nonic.txt", "NVIDIA H200", 143771, (200, 700), "9.0", nvswitch=True
)
PCIE_PAIRS = Machine(
    "03-8x-rtxpro6000-broadcom-switch-pairs-ansi.txt",
    "NVIDIA RTX PRO 6000 Blackwell Server Edition",
    97887,
    (150, 600),
    "12.0",
)


def install(lab: Lab, number: int, machine: Machine) -> None:
    """Puts a machine's GPUs into a running host, driver packages and all."""
    _write_data(lab, number, machine)
    packages = lab.root(number) / "root/packages"
    packages.mkdir()
    for package in _packages(lab.folder / "nvidia-packages"):
        shutil.copy(package, packages)
    lab.run(number, "dpkg --install /root/packages/*.deb && rm -r /root/packages && ldconfig")
    # As their packages do; on a host without NVSwitches an operator has turned the latter off.
    manager = "nvidia-fabricmanager" if machine.nvswitch else ""
    lab.run(number, f"systemctl enable --quiet nvidia-persistenced {manager}")


def remove(lab: Lab, number: int) -> None:
    """Takes them out again."""
    lab.run(
        number,
        "systemctl disable --now nvidia-persistenced nvidia-fabricmanager fake-nvidia; "
        "umount /proc/driver /sys/bus/pci/devices; rm -f /dev/nvidia* /dev/char/195:* /dev/char/510:*; "
        f"dpkg --purge --force-hold {' '.join(_contents(lab.folder / 'nvidia-packages'))} && "
        "rm -rf /var/lib/fake-nvidia /run/fake-nvidia && ldconfig && systemctl daemon-reload && "
        "systemctl reset-failed",
    )


def offer(lab: Lab, number: int, machine: Machine) -> None:
    """A host without a driver, whose package repository has one; apt reaches no other."""
    _write_data(lab, number, machine)
    root = lab.root(number)
    repository = root / "opt/repository"
    repository.mkdir()
    index = []
    for package in _packages(lab.folder / "nvidia-packages"):
        shutil.copy(package, repository)
        control = (package.with_suffix("") / "DEBIAN/control").read_text()
        digest = hashlib.sha256(package.read_bytes()).hexdigest()
        size = package.stat().st_size
        index.append(f"{control}Filename: ./{package.name}\nSize: {size}\nSHA256: {digest}\n")
    (repository / "Packages").write_text("\n".join(index))
    lab.run(
        number,
        "mkdir /root/apt && mv /etc/apt/sources.list* /root/apt/ && "
        "echo 'deb [trusted=yes] file:/opt/repository ./' >/etc/apt/sources.list",
    )


def withdraw(lab: Lab, number: int) -> None:
    """Undoes `offer`, and removes what was installed from it."""
    remove(lab, number)
    lab.run(
        number,
        "rm -r /opt/repository /etc/apt/sources.list && mv /root/apt/* /etc/apt/ && "
        "rmdir /root/apt",
    )


def set_version(lab: Lab, number: int, what: str, version: str) -> None:
    """what: "library" or "module" (as of the next boot of fake-nvidia), or "fabricmanager"."""
    (lab.root(number) / f"var/lib/fake-nvidia/{what}-version").write_text(version + "\n")


def set_cuda(lab: Lab, number: int, result: int) -> None:
    """What cuInit answers from now on."""
    library = _cuda(lab.folder / "nvidia-packages", result)
    target = lab.root(number) / LIBRARIES / "libcuda.so.1"
    fresh = target.with_name("libcuda.so.1.new")
    shutil.copy(library, fresh)
    fresh.replace(target)


def _write_bus(folder: Path, machine: Machine, gpus: list[dict]) -> None:
    """/sys/bus/pci/devices. CPUs are this machine's own: the recording's may not exist."""
    cpus = sorted(os.sched_getaffinity(0))
    half = (len(cpus) + 1) // 2
    nodes = {0: cpus[:half], 1: cpus[half:] or cpus}
    numa = parse_matrix(machine.topology).numa
    for gpu in gpus:
        (node,) = numa[gpu["index"]]
        device = folder / sysfs_address(gpu["pci_bus_id"])
        device.mkdir()
        for name, text in (
            ("vendor", "0x10de"),
            ("class", "0x030200"),
            ("numa_node", str(node)),
            ("local_cpulist", ",".join(map(str, nodes[node]))),
        ):
            (device / name).write_text(text + "\n")
    for index in range(4 if machine.nvswitch else 0):
        device = folder / f"0000:{0x40 + index:02x}:00.0"
        device.mkdir()
        (device / "vendor").write_text("0x10de\n")
        (device / "class").write_text("0x068000\n")


def _write_data(lab: Lab, number: int, machine: Machine) -> None:
    """What the programs replay."""
    data = lab.root(number) / "var/lib/fake-nvidia"
    (data / "pci").mkdir(parents=True)
    gpus = machine.gpus()
    (data / "machine.json").write_text(json.dumps({"gpus": gpus, "nvswitch": machine.nvswitch}))
    (data / "topo.txt").write_text(machine.topology)
    shutil.copy(QUERY, data / "query.txt")
    for what in ("library", "module", "fabricmanager"):
        set_version(lab, number, what, DRIVER)
    for gpu in gpus:
        (data / f"minor-{gpu['index']}").touch()
    _write_bus(data / "pci", machine, gpus)


def _packages(folder: Path) -> list[Path]:
    return [_package(folder, name, files) for name, files in _contents(folder).items()]


def _contents(folder: Path) -> dict[str, dict[str, Path]]:
    """The driver in the packages that Ubuntu splits it into, and one that is none of it."""
    major = DRIVER.partition(".")[0]
    return {
        f"nvidia-kernel-common-{major}-server": {
            f"{BINARIES}/fake-nvidia-boot": HERE / "bin/fake-nvidia-boot",
            f"{UNITS}/fake-nvidia.service": HERE / "units/fake-nvidia.service",
        },
        f"nvidia-utils-{major}-server": {f"{BINARIES}/nvidia-smi": HERE / "bin/nvidia-smi"},
        f"libnvidia-compute-{major}-server": {f"{LIBRARIES}/libcuda.so.1": _cuda(folder, 0)},
        "nvidia-modprobe": {f"{BINARIES}/nvidia-modprobe": HERE / "bin/nvidia-modprobe"},
        "nvidia-persistenced": {
            f"{BINARIES}/nvidia-persistenced": HERE / "bin/nvidia-persistenced",
            f"{UNITS}/nvidia-persistenced.service": HERE / "units/nvidia-persistenced.service",
        },
        f"nvidia-fabricmanager-{major}": {
            f"{BINARIES}/nv-fabricmanager": HERE / "bin/nv-fabricmanager",
            f"{UNITS}/nvidia-fabricmanager.service": HERE / "units/nvidia-fabricmanager.service",
        },
        "libnvidia-container1": {},
    }


def _package(folder: Path, name: str, files: dict[str, Path]) -> Path:
    tree = folder / name
    shutil.rmtree(tree, ignore_errors=True)
    (tree / "DEBIAN").mkdir(parents=True)
    (tree / "DEBIAN/control").write_text(
        f"Package: {name}\nVersion: {DRIVER}-1\nArchitecture: amd64\n"
        "Maintainer: none <none@example.org>\nDescription: replays recorded fixtures\n"
    )
    if name.startswith("nvidia-kernel-common"):
        script = tree / "DEBIAN/postinst"
        script.write_text(f"#!/bin/sh\nset -e\n{LOAD}\n")
        script.chmod(0o755)
    for path, source in files.items():
        target = tree / path
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, target)
    package = folder / f"{name}.deb"
    subprocess.run(
        ["dpkg-deb", "--root-owner-group", "-Znone", "--build", tree, package],
        check=True,
        capture_output=True,
        timeout=60,
    )
    return package


def _cuda(folder: Path, result: int) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    library = folder / f"libcuda-{result}.so"
    compiler = shutil.which("cc") or shutil.which("tcc")
    assert compiler is not None
    options = ["-shared", "-nostdlib", f"-DRESULT={result}"]
    subprocess.run([compiler, *options, "-o", library, HERE / "cuda.c"], check=True, timeout=60)
    return library
