# SPDX-License-Identifier: Apache-2.0
"""Hosts that are not there: files below a temporary root, and recorded answers of commands."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ddtree_preflight.host import Done, Host

DRIVER = "580.159.04"
GPU_QUERY = "nvidia-smi --query-gpu=index,uuid,memory.free"
CUDA = "import ctypes"
OS_RELEASE = 'PRETTY_NAME="Debian GNU/Linux 12 (bookworm)"\nID=debian\nVERSION_ID="12"\n'


class FakeHost(Host):
    """A sound Debian host with one H200 until something is changed.

    Attributes:
        answers: command (by how it begins, or for Python by what it holds) -> what it answers.
        asked: every command.
    """

    def __init__(self, root: Path, gpus: int = 1) -> None:
        super().__init__(str(root), self._answer)
        self.root, self.asked = root, list[str]()
        self.free, self.shm, self.clock, self.uid = 500_000, 32_000, 1_000_000.0, 0
        self.answers: dict[str, Done] = {
            "uname -m": Done(0, "x86_64\n"),
            "systemctl --version": Done(0, "systemd 252 (252.30-1~deb12u2)\n+PAM\n"),
            "python3 -c": Done(0, "3.11\n"),
            "timedatectl show": Done(0, "yes\n"),
            "dpkg --audit": Done(0, ""),
            "nvidia-smi -L": Done(0, "GPU 0: NVIDIA H200 (UUID: GPU-0)\n"),
            "nvidia-smi --query-gpu=index,fabric.state": Done(0, "0, N/A\n"),
            GPU_QUERY: Done(
                0,
                "".join(
                    f"{i}, GPU-{i}, 143000, Enabled, Default, 9.0, NVIDIA H200\n"
                    for i in range(gpus)
                ),
            ),
            "nvidia-smi --query-compute-apps": Done(0, ""),
            "nvidia-smi -q": Done(0, ""),
            CUDA: Done(0, f'{{"result": 0, "count": {gpus}}}\n'),
            "systemctl show --property=ActiveState": Done(0, "inactive\n"),
        }
        self.write("etc/os-release", OS_RELEASE)
        self.write("run/systemd/system/.keep", "")
        self.write("proc/meminfo", "MemTotal:       263856152 kB\n")
        self.write("proc/cpuinfo", "processor\t: 0\n" * 64)
        self.write(
            "proc/driver/nvidia/version",
            f"NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {DRIVER}  Release Build\n",
        )
        self.install_libraries(DRIVER)

    def write(self, name: str, text: str) -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def remove(self, name: str) -> None:
        (self.root / name).unlink()

    def install_libraries(self, version: str) -> None:
        folder = self.root / "usr/lib/x86_64-linux-gnu"
        folder.mkdir(parents=True, exist_ok=True)
        for old in folder.glob("libcuda*"):
            old.unlink()
        (folder / f"libcuda.so.{version}").write_text("")
        (folder / "libcuda.so.1").symlink_to(f"libcuda.so.{version}")

    def nvswitch(
        self, fabric: str = "Completed", manager: str = DRIVER, state: str = "active"
    ) -> None:
        """Turns it into a host with NVSwitches."""
        self.write("sys/bus/pci/devices/0000:c3:00.0/vendor", "0x10de\n")
        self.write("sys/bus/pci/devices/0000:c3:00.0/class", "0x068000\n")
        self.answers["nvidia-smi --query-gpu=index,fabric.state"] = Done(0, f"0, {fabric}\n")
        self.answers["systemctl show --property=ActiveState"] = Done(0, f"{state}\n")
        if manager:
            self.answers["nv-fabricmanager --version"] = Done(
                0, f"Fabric Manager version is : {manager}\n"
            )

    def _answer(self, command: Sequence[str], timeout_s: float) -> Done:
        text = " ".join(command)
        self.asked.append(text)
        for begin, done in self.answers.items():
            if text.startswith(begin) or (begin == CUDA and begin in text):
                return done
        return Done(None, "")

    def free_mib(self, name: str) -> tuple[int, int]:
        return self.free, 1

    def size_mib(self, name: str) -> int:
        return self.shm

    def now(self) -> float:
        return self.clock

    def user(self) -> int:
        return self.uid
