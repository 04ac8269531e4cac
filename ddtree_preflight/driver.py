# SPDX-License-Identifier: Apache-2.0
"""The NVIDIA driver: loaded, the one that is installed, and able to initialise CUDA.

`nvidia-smi` can be well where CUDA is not, so CUDA is initialised in a process of its own, which a
hanging driver cannot hold up for ever.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass

from .host import Host
from .report import Finding, passed, refuse, warn
from .request import Request

_LIBRARIES = (
    "/usr/lib/x86_64-linux-gnu/libcuda.so.1",
    "/usr/lib/x86_64-linux-gnu/nvidia/current/libcuda.so.1",
    "/usr/lib64/libcuda.so.1",
    "/usr/lib/libcuda.so.1",
)
_INITIALISE = """
import ctypes, json
try:
    library = ctypes.CDLL("libcuda.so.1")
except OSError as error:
    print(json.dumps({"error": str(error)}))
else:
    result, count = library.cuInit(0), ctypes.c_int(-1)
    if result == 0:
        result = library.cuDeviceGetCount(ctypes.byref(count))
    print(json.dumps({"result": result, "count": count.value}))
"""
_MISMATCH = re.compile(r"driver/library version mismatch", re.I)
_CUDA = {
    46: "the GPUs are busy or unavailable: is another process in exclusive mode?",
    100: "there is no device: are the nodes /dev/nvidia* there?",
    304: "the operating system refused a call: is /dev/nvidia-uvm there?",
    803: "driver and library are of different versions: reboot the host",
    999: "unknown error: is the module nvidia_uvm loaded, and has the kernel's log an Xid?",
}
_NOT_INITIALISED = 802


@dataclass(frozen=True)
class Driver:
    """Attributes:
    loaded: version of the kernel module, "" if none is loaded.
    installed: version of the libraries, "" if there are none.
    answers: nvidia-smi works.
    """

    loaded: str
    installed: str
    answers: bool


def look(host: Host) -> Driver:
    words = host.read("/proc/driver/nvidia/version").split()
    loaded = next((word for word in words if re.fullmatch(r"\d+\.[\d.]+", word)), "")
    installed = ""
    for library in _LIBRARIES:
        found = re.search(r"\.so\.(\d+\.[\d.]+)$", host.target(library))
        if found and host.exists(library):
            installed = found.group(1)
            break
    return Driver(loaded, installed, host.run("nvidia-smi", "-L").status == 0)


def check_driver(host: Host, request: Request) -> Iterator[Finding]:
    if request.cpu_only:
        return
    driver, asked = look(host), host.run("nvidia-smi", "-L")
    if "nouveau" in host.names("/sys/module"):
        yield refuse(
            "driver",
            "the module nouveau holds the GPUs: blacklist it in /etc/modprobe.d, and reboot",
        )
    if asked.absent and not driver.loaded:
        missing = "there is no NVIDIA driver on this host"
        if request.installs_driver:
            yield warn("driver", f"{missing}; the role nvidia_host installs it")
        else:
            yield refuse(
                "driver",
                f"{missing}: install one, set nvidia_host_driver_install, or set "
                "gpu_topology_cpu_only for a host "
                "that is meant to have no GPU",
            )
        return
    if _MISMATCH.search(asked.out) or (
        driver.loaded and driver.installed and driver.loaded != driver.installed
    ):
        yield refuse(
            "driver",
            f"the kernel has driver {driver.loaded or 'of another version'} loaded and "
            f"{driver.installed or 'another'} is installed, as after an unattended upgrade: reboot "
            "the host, and "
            "hold the driver's packages",
        )
        return
    if asked.hung:
        yield refuse(
            "driver",
            "nvidia-smi does not answer within a minute: the driver hangs; reboot the host",
        )
        return
    if not driver.answers:
        yield refuse(
            "driver",
            f"nvidia-smi fails ({asked.said}): is the kernel module loaded? `modprobe nvidia` says "
            "why not",
        )
        return
    version = driver.loaded or driver.installed
    if version and _number(version) < _number(request.driver_min):
        yield refuse(
            "driver",
            f"driver {version} is older than {request.driver_min}, which CUDA 13 needs",
        )
    else:
        yield passed("driver", f"driver {version or 'of unknown version'}")


def _number(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part.isdigit())


def check_cuda(host: Host, request: Request) -> Iterator[Finding]:
    driver = look(host)
    if request.cpu_only or not driver.answers:
        return  # said already
    done = host.run(sys.executable, "-c", _INITIALISE, timeout_s=request.cuda_timeout_s)
    if done.hung:
        yield refuse(
            "cuda",
            f"CUDA does not initialise within {request.cuda_timeout_s} s although nvidia-smi "
            "answers: the driver "
            "hangs; reboot the host",
        )
        return
    try:
        answer = json.loads(done.said)
    except ValueError:
        yield refuse(
            "cuda", f"the process that initialises CUDA ended with {done.status}: {done.said}"
        )
        return
    if "error" in answer:
        yield refuse(
            "cuda", f"the driver's library cannot be loaded ({answer['error']}): install libcuda1"
        )
    elif answer["result"] == _NOT_INITIALISED:
        yield from _not_initialised(host, request, driver)
    elif answer["result"] != 0:
        what = _CUDA.get(answer["result"], "see CUresult in CUDA's documentation")
        yield refuse("cuda", f"nvidia-smi is well, and CUDA answers {answer['result']}: {what}")
    else:
        yield passed("cuda", f"CUDA initialises and sees {answer['count']} GPUs")


def _not_initialised(host: Host, request: Request, driver: Driver) -> Iterator[Finding]:
    manager = FabricManager.of(host)
    begin = "nvidia-smi is well, and CUDA answers 802, system not yet initialised"
    if manager.version == driver.loaded and not manager.active and request.starts_fabric_manager:
        yield warn(
            "cuda", f"{begin}: the fabric manager does not run; the role nvidia_host starts it"
        )
    elif not manager.version:
        yield refuse(
            "cuda",
            f"{begin}: this host needs the fabric manager, nvidia-fabricmanager {driver.loaded}",
        )
    elif manager.active:
        yield refuse(
            "cuda",
            f"{begin} though the fabric manager runs: `journalctl -u nvidia-fabricmanager` says "
            "why",
        )
    else:
        yield refuse(
            "cuda", f"{begin}: start the fabric manager, `systemctl start nvidia-fabricmanager`"
        )


@dataclass(frozen=True)
class FabricManager:
    """Attributes:
    version: "" if it is not installed.
    """

    version: str
    active: bool
    failed: bool

    @classmethod
    def of(cls, host: Host) -> FabricManager:
        said = host.run("nv-fabricmanager", "--version")
        found = re.search(r"\d+\.\d+[\d.]*", said.out) if said.status == 0 else None
        state = host.run(
            "systemctl", "show", "--property=ActiveState", "--value", "nvidia-fabricmanager.service"
        ).out.strip()
        return cls(
            found.group(0).rstrip(".") if found else "", state == "active", state == "failed"
        )


def check_fabric(host: Host, request: Request) -> Iterator[Finding]:
    """The fabric manager belongs to hosts with NVSwitches alone, in the driver's version."""
    driver = look(host)
    if request.cpu_only or not driver.answers:
        return
    switches = _switches(host)
    states = host.run("nvidia-smi", "--query-gpu=index,fabric.state", "--format=csv,noheader")
    pairs = [line.partition(",")[::2] for line in states.out.splitlines() if states.status == 0]
    unset = ("", "n/a", "[n/a]", "not supported", "[not supported]")
    fabric = {
        index.strip(): state.strip() for index, state in pairs if state.strip().lower() not in unset
    }
    manager = FabricManager.of(host)
    if not switches and not fabric:
        if manager.failed:
            yield warn(
                "fabric",
                "the fabric manager is installed and fails, as it does on a host without "
                "NVSwitches: "
                "`systemctl disable nvidia-fabricmanager`",
            )
        return
    if not manager.version:
        yield refuse(
            "fabric",
            "this host has NVSwitches and no fabric manager: install nvidia-fabricmanager "
            f"{driver.loaded}",
        )
        return
    if driver.loaded and manager.version != driver.loaded:
        yield refuse(
            "fabric",
            f"the fabric manager is {manager.version} and the driver {driver.loaded}: their "
            "versions have to be the "
            "same",
        )
        return
    waiting = [f"GPU {index}: {state}" for index, state in fabric.items() if state != "Completed"]
    if not manager.active and request.starts_fabric_manager:
        yield warn("fabric", "the fabric manager does not run; the role nvidia_host starts it")
    elif not manager.active:
        yield refuse(
            "fabric",
            "the fabric manager does not run: `systemctl enable --now nvidia-fabricmanager`",
        )
    elif waiting:
        yield refuse(
            "fabric",
            f"the NVLink fabric is not Completed ({', '.join(waiting)}): wait for the fabric "
            "manager, or see "
            "`journalctl -u nvidia-fabricmanager`",
        )
    else:
        yield passed("fabric", f"fabric manager {manager.version}, fabric Completed")


def _switches(host: Host) -> int:
    devices = "/sys/bus/pci/devices"
    return sum(
        host.read(f"{devices}/{name}/vendor").strip() == "0x10de"
        and host.read(f"{devices}/{name}/class").strip() == "0x068000"
        for name in host.names(devices)
    )


def check_upgrades(host: Host, request: Request) -> Iterator[Finding]:
    """Driver packages that unattended upgrades may replace under a running system."""
    if request.cpu_only or not host.exists("/usr/bin/unattended-upgrade"):
        return
    rows = host.run("dpkg-query", "--show", "--showformat=${db:Status-Want} ${Package}\\n")
    loose = [
        line.split()[1]
        for line in rows.out.splitlines()
        if rows.status == 0
        and line.startswith("install ")
        and re.match(r"install (nvidia-(driver|kernel|dkms)|libcuda1|libnvidia-compute)", line)
    ]
    if loose:
        yield warn(
            "upgrades",
            "unattended upgrades may replace the driver under a running system "
            f"({', '.join(loose)}); the role "
            "nvidia_host holds its packages",
        )
