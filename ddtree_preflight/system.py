# SPDX-License-Identifier: Apache-2.0
"""The host without its GPUs: distribution, systemd, Python, memory, disk, clock."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from .host import Host
from .report import Finding, passed, refuse, warn
from .request import Request

# Oldest release that the roles are written for.
_RELEASES = {"debian": 11, "ubuntu": 22.04}
_SHM_MIN_MIB = 1024
_PYTHONS = ("3.11", "3.12")


def check_user(host: Host, request: Request) -> Iterator[Finding]:
    if host.user() != 0:
        yield refuse(
            "user", "the tasks do not run as root: set become, and a user that may use sudo"
        )
    else:
        yield passed("user", "root")


def check_release(host: Host, request: Request) -> Iterator[Finding]:
    values = dict(
        re.findall(r'^(\w+)="?([^"\n]*)"?$', host.read("/etc/os-release"), flags=re.MULTILINE)
    )
    name = values.get("PRETTY_NAME") or "an unknown system"
    oldest = _RELEASES.get(values.get("ID", ""))
    try:
        release = float(values.get("VERSION_ID", ""))
    except ValueError:
        release = 0.0
    if oldest is None or (release and release < oldest):
        yield refuse(
            "os", f"{name} is not a system these roles know: Debian 11 or Ubuntu 22.04, or newer"
        )
    elif not release:
        yield warn("os", f"{name} does not say which release it is")
    else:
        yield passed("os", name)
    machine = host.run("uname", "-m").out.strip()
    if machine not in ("x86_64", ""):
        yield refuse("os", f"this host is {machine}; the pinned packages are for x86_64")


def check_systemd(host: Host, request: Request) -> Iterator[Finding]:
    if not host.exists("/run/systemd/system"):
        yield refuse(
            "systemd", "systemd does not run this host, and the service is made of its units"
        )
        return
    found = re.search(r"systemd (\d+)", host.run("systemctl", "--version").out)
    version = int(found.group(1)) if found else 0
    if version < request.systemd_min:
        yield refuse(
            "systemd",
            f"systemd is {version or 'of unknown version'}, and the units need "
            f"{request.systemd_min} or newer",
        )
    else:
        yield passed("systemd", f"systemd {version}")


def check_python(host: Host, request: Request) -> Iterator[Finding]:
    version = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info < (3, 9):  # noqa: UP036 (of the host, not of this project)
        yield refuse(
            "python", f"{sys.executable} is Python {version}, and the programs need 3.9 or newer"
        )
    else:
        yield passed("python", f"Python {version} for the programs")
    if request.mode == "native" and request.installs_venv:
        yield from _check_venv_python(host, request)


def _check_venv_python(host: Host, request: Request) -> Iterator[Finding]:
    asked = host.run(request.python, "-c", "import sys; print('%d.%d' % sys.version_info[:2])")
    if asked.absent:
        yield refuse(
            "python",
            f"vllm_service_python, {request.python}, is not on this host: install Python 3.11 or "
            "3.12, or serve "
            "from an image (vllm_service_mode: container)",
        )
    elif asked.said not in _PYTHONS:
        yield refuse(
            "python",
            f"{request.python} is Python {asked.said}, and vLLM's pinned packages are for 3.11 and "
            "3.12: set "
            "vllm_service_python, or serve from an image (vllm_service_mode: container)",
        )
    else:
        yield passed("python", f"Python {asked.said} for the venv")


def check_vllm(host: Host, request: Request) -> Iterator[Finding]:
    """A venv that is taken as it is."""
    if request.mode != "native" or request.installs_venv:
        return
    if not host.exists(f"{request.venv}/bin/ddtree-vllm"):
        yield refuse(
            "vllm",
            f"{request.venv} has no ddtree-vllm, and vllm_service_install is false: name the venv "
            "in "
            "vllm_service_venv, or let the role make one",
        )
        return
    library = f"{request.venv}/lib"
    found = {
        match.group(1)
        for version in host.names(library)
        for name in host.names(f"{library}/{version}/site-packages")
        for match in [re.fullmatch(r"vllm(?:_cpu)?-(.+)\.dist-info", name)]
        if match
    }
    wrong = sorted(
        version for version in found if version.partition("+")[0] != request.vllm_version
    )
    if wrong:
        yield refuse(
            "vllm",
            f"{request.venv} has vLLM {', '.join(wrong)}; the plugin is written for "
            f"{request.vllm_version} alone",
        )
    elif found:
        yield passed("vllm", f"vLLM {request.vllm_version}")


def check_memory(host: Host, request: Request) -> Iterator[Finding]:
    memory = dict(re.findall(r"^(\w+):\s+(\d+) kB$", host.read("/proc/meminfo"), re.MULTILINE))
    total = int(memory.get("MemTotal", 0)) // 1024
    if total < request.memory_mib:
        yield refuse("memory", f"{total} MiB of memory, and {request.memory_mib} are needed")
    else:
        yield passed("memory", f"{total} MiB of memory")
    cpus = len(re.findall(r"^processor\s*:", host.read("/proc/cpuinfo"), re.MULTILINE))
    if cpus and cpus < request.cpus:
        yield refuse(
            "cpus",
            f"{cpus} CPU, and {request.cpus} are needed: the server and the engine are two "
            "processes",
        )
    elif cpus:
        yield passed("cpus", f"{cpus} CPUs")


def check_shm(host: Host, request: Request) -> Iterator[Finding]:
    """Ranks of one instance exchange data through /dev/shm; 64 MB break that."""
    if request.tensor_parallel < 2:
        return
    if request.mode == "container":
        size, what = request.shm_mib, "vllm_service_shm_size is"
        mend = "raise it"
    else:
        size, what = host.size_mib("/dev/shm"), "/dev/shm has"
        mend = "mount it with a larger size= in /etc/fstab"
    if size < _SHM_MIN_MIB:
        yield refuse(
            "shm",
            f"{what} {size} MiB, and tensor parallelism over {request.tensor_parallel} GPUs needs "
            f"{_SHM_MIN_MIB}: {mend}",
        )
    else:
        yield passed("shm", f"{what} {size} MiB")


def check_disk(host: Host, request: Request) -> Iterator[Finding]:
    """Needs on one file system add up."""
    needs: dict[int, list[tuple[str, int, str]]] = {}
    free: dict[int, int] = {}
    for item in request.disk:
        if _is_there(host, request, item):
            continue
        path = _docker_folder(host, request, item) if item.get("docker") else str(item["path"])
        there, device = host.free_mib(path)
        free[device] = there
        # What an interrupted fetch has brought takes its room already.
        come = host.used_mib(str(item["partial"])) if item.get("partial") else 0
        needs.setdefault(device, []).append(
            (path, max(int(item["mib"]) - come, 0), str(item.get("what") or ""))
        )
    for device, items in needs.items():
        total = sum(mib for _, mib, _ in items)
        listed = ", ".join(f"{mib} for {what or path} in {path}" for path, mib, what in items)
        if total > free[device]:
            yield refuse(
                "disk", f"{free[device]} MiB of disk are free, and {total} are needed: {listed}"
            )
        else:
            yield passed("disk", f"{free[device]} MiB of disk are free, {total} needed")


def _is_there(host: Host, request: Request, item: Mapping[str, Any]) -> bool:
    """It takes its room already."""
    if item.get("image"):
        return _is_loaded(host, request, item)
    if item.get("made"):
        return host.exists(str(item["made"]))
    return _is_fetched(host, item)


def _is_loaded(host: Host, request: Request, item: Mapping[str, Any]) -> bool:
    """As the role `vllm_service` tells it: an archive that says nothing loads no image a second time."""
    asked = host.run(request.docker, "image", "inspect", "--format", "{{.Id}}", str(item["image"]))
    if asked.status != 0:
        return False
    digest = item.get("digest") or ""
    noted = [line.split() for line in host.read(str(item.get("record"))).splitlines()]
    return digest in ("", asked.said) or [digest, asked.said, item["image"]] in noted


def _docker_folder(host: Host, request: Request, item: Mapping[str, Any]) -> str:
    """Where Docker unpacks images; without one, where the one to come will."""
    asked = host.run(request.docker, "info", "--format", "{{.DockerRootDir}} {{.DriverStatus}}")
    if asked.status != 0 or not asked.said.startswith("/"):
        return str(item["path"])
    if "io.containerd.snapshotter" in asked.said:
        return "/var/lib/containerd"
    return asked.said.split(" ")[0]


def _is_fetched(host: Host, item: Mapping[str, Any]) -> bool:
    """A model that is there as it is wanted now, as `ddtree-models` noted; a new revision is not."""
    if not item.get("record") or not host.exists(str(item["path"])):
        return False
    try:
        identity = dict(json.loads(host.read(str(item["record"])))["identity"])
    except (ValueError, KeyError, TypeError):
        return False
    wanted = item.get("model") or {}
    return all((wanted.get(key) or type(value)()) == value for key, value in identity.items())


def check_clock(host: Host, request: Request) -> Iterator[Finding]:
    if request.controller_time:
        skew = host.now() - request.controller_time
        # What it took to get here makes the host look late, never early.
        if skew < -5 or skew > request.max_skew_s:
            yield refuse(
                "clock",
                f"the clock is {abs(skew):.0f} s {'ahead of' if skew > 0 else 'behind'} the "
                "controller's: "
                "certificates and tokens would be refused; let it be set by NTP",
            )
            return
    said = host.run("timedatectl", "show", "--property=NTPSynchronized", "--value")
    if said.status == 0 and said.out.strip() == "no":
        yield warn(
            "clock", "nothing keeps the clock synchronised; install systemd-timesyncd or chrony"
        )
    else:
        yield passed("clock", "the clock agrees with the controller's")


def check_packages(host: Host, request: Request) -> Iterator[Finding]:
    """A half-configured dpkg stops every later task."""
    audit = host.run("dpkg", "--audit")
    if audit.status == 0 and audit.out.strip():
        yield refuse(
            "packages", "dpkg has packages that are not fully installed: `dpkg --configure -a`"
        )
