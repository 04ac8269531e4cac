# SPDX-License-Identifier: Apache-2.0
"""What this host says of its GPUs: nvidia-smi, /sys and /proc. Reads only."""

from __future__ import annotations

import contextlib
import csv
import os
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from . import acs, cpulist
from .errors import TopologyError
from .inventory import Gpu, gpus_from
from .matrix import Matrix, parse_matrix, parse_p2p, single
from .planner import plan

_TIMEOUT_S = 60  # a wedged driver blocks nvidia-smi for ever
_QUERY = ("index", "name", "uuid", "memory.total", "mig.mode.current", "pci.bus_id")
# Processes whose control group carries this name are our own instances.
OWN_CGROUPS = ("ddtree-vllm",)

Run = Callable[[Sequence[str]], str]


@dataclass(frozen=True)
class Host:
    """Attributes:
    driver, firmware: versions of the NVIDIA driver and the BIOS, "" if unknown.
    peer_status: `parse_p2p`, None if not to be had.
    redirects: `acs.peer_redirects`.
    """

    matrix: Matrix
    gpus: tuple[Gpu, ...]
    driver: str = ""
    firmware: str = ""
    peer_status: tuple[tuple[str, ...], ...] | None = None
    redirects: tuple[dict[str, Any], ...] = ()
    warnings: tuple[str, ...] = field(default=())


def run_command(command: Sequence[str]) -> str:
    """Standard output of a command.

    Raises:
        TopologyError: it is missing, fails or takes more than a minute.
    """
    try:
        process = subprocess.Popen(
            list(command),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            stdin=subprocess.DEVNULL,
            env={**os.environ, "LC_ALL": "C"},
        )
    except FileNotFoundError:
        raise TopologyError(
            f"{command[0]} is not on this host: install the NVIDIA driver, or ask for cpu_only"
        ) from None
    except OSError as error:
        raise TopologyError(f"`{' '.join(command)}` cannot be run: {error}") from None
    try:
        out, err = process.communicate(timeout=_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        # Not waited for to the end: what hangs in a driver is not ended by SIGKILL either.
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(1)
        raise TopologyError(
            f"`{' '.join(command)}` did not answer within {_TIMEOUT_S} s: the driver hangs"
        ) from None
    if process.returncode != 0:
        said = (err.strip() or out.strip() or "nothing").splitlines()[-1]
        raise TopologyError(
            f"`{' '.join(command)}` failed with exit status {process.returncode}: {said}"
        )
    return out


def read_host(
    run: Run = run_command,
    root: str = "/",
    own_cgroups: Sequence[str] = OWN_CGROUPS,
    matrix_text: str | None = None,
) -> Host:
    """Asks nvidia-smi for the GPUs and their links, and sysfs for their place.

    Args:
        run: runs a command and returns its output.
        root: where /sys and /proc are looked for.
        own_cgroups: processes in a control group with one of these names do not make a GPU busy.
        matrix_text: used instead of asking for `topo -m`.

    Raises:
        TopologyError: nvidia-smi is missing, fails, or its answers do not fit together.
    """
    gpus = read_gpus(run, root, own_cgroups)
    warnings: list[str] = []
    if matrix_text is not None:
        matrix = parse_matrix(matrix_text)
    elif len(gpus) == 1:
        matrix = single()
    else:
        matrix = parse_matrix(run(["nvidia-smi", "topo", "-m"]))
    peer_status = None
    if len(gpus) > 1:
        try:
            peer_status = parse_p2p(run(["nvidia-smi", "topo", "-p2p", "r"]))
        except TopologyError as error:
            warnings.append(f"Whether the driver reports peer access is not known: {error}.")
    if peer_status is not None and len(peer_status) != len(gpus):
        raise TopologyError(
            f"nvidia-smi lists {len(gpus)} GPUs and its peer access matrix {len(peer_status)}: a "
            "GPU fell off the bus between the two"
        )
    addresses = {gpu.index: gpu.pci_bus_id for gpu in gpus if gpu.pci_bus_id}
    redirects, notes = acs.peer_redirects(addresses, root)
    return Host(
        matrix=matrix,
        gpus=tuple(gpus),
        driver=_driver(root),
        firmware=_firmware(root),
        peer_status=peer_status,
        redirects=tuple(redirects),
        warnings=(*warnings, *notes),
    )


def plan_host(found: Host, **request: Any) -> dict[str, Any]:
    """`planner.plan` for a host that was read; `request` are its other keywords.

    Raises:
        TopologyError: no honest plan exists.
    """
    made = plan(
        found.matrix,
        found.gpus,
        peer_status=found.peer_status,
        redirects=found.redirects,
        driver=found.driver,
        firmware=found.firmware,
        **request,
    )
    made["warnings"] = [*found.warnings, *made["warnings"]]
    return made


def read_gpus(run: Run, root: str = "/", own_cgroups: Sequence[str] = OWN_CGROUPS) -> list[Gpu]:
    """The inventory, with foreign processes and sysfs affinities.

    Raises:
        TopologyError: nvidia-smi fails or answers in another form.
    """
    query = ["nvidia-smi", f"--query-gpu={','.join(_QUERY)}", "--format=csv,noheader,nounits"]
    items = []
    for row in _csv(run(query)):
        if len(row) != len(_QUERY):
            raise TopologyError(
                f"`{' '.join(query)}` answered {', '.join(row)!r}, not {len(_QUERY)} values"
            )
        index, name, uuid, memory, mig, bus = row
        items.append(
            {
                "index": index,
                "name": name,
                "uuid": uuid,
                "memory_mib": memory if memory.isdigit() else None,
                "mig": mig,
                "pci_bus_id": bus,
            }
        )
    if not items:
        raise TopologyError("nvidia-smi lists no GPU: is the driver loaded, or is cpu_only meant?")
    busy = _foreign_processes(run, root, own_cgroups)
    gpus = []
    for gpu in gpus_from(items):
        cpus, numa = _affinity(gpu.pci_bus_id, root)
        gpus.append(replace(gpu, cpus=cpus, numa=numa, busy=busy.get(gpu.uuid, "")))
    return gpus


def online(root: str = "/") -> tuple[str, str]:
    """CPUs and memory nodes of the host that are online, as Linux lists."""
    base = os.path.join(root, "sys/devices/system")
    return _text(f"{base}/cpu/online"), _text(f"{base}/node/online")


def _foreign_processes(run: Run, root: str, own_cgroups: Sequence[str]) -> dict[str, str]:
    query = ["nvidia-smi", "--query-compute-apps=gpu_uuid,pid,process_name"]
    busy: dict[str, list[str]] = {}
    for row in _csv(run([*query, "--format=csv,noheader"])):
        if len(row) < 3 or not row[1].isdigit():
            continue
        uuid, pid, name = row[0], row[1], ", ".join(row[2:])
        # A container's processes are named from inside it: only the control group tells whose.
        cgroup = _text(os.path.join(root, "proc", pid, "cgroup"))
        if not any(own in cgroup for own in own_cgroups if own):
            busy.setdefault(uuid, []).append(f"{name.rsplit('/', 1)[-1]} (pid {pid})")
    return {uuid: ", ".join(names) for uuid, names in busy.items()}


def _affinity(pci_bus_id: str, root: str) -> tuple[str | None, tuple[int, ...] | None]:
    if not pci_bus_id:
        return None, None
    device = os.path.join(root, "sys/bus/pci/devices", acs.sysfs_address(pci_bus_id))
    try:
        cpus = cpulist.format_list(cpulist.parse(_text(f"{device}/local_cpulist"))) or None
    except ValueError:
        cpus = None
    node = _text(f"{device}/numa_node")
    if node.isdigit():
        return cpus, (int(node),)
    # -1: the firmware does not say. On a host with one node there is nothing to say.
    if node == "-1" and online(root)[1] == "0":
        return cpus, (0,)
    return cpus, None


def _driver(root: str) -> str:
    words = _text(os.path.join(root, "proc/driver/nvidia/version")).split()
    # "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.159.04  Sun Nov ..."
    return next((word for word in words if word.replace(".", "").isdigit() and "." in word), "")


def _firmware(root: str) -> str:
    base = os.path.join(root, "sys/class/dmi/id")
    return " ".join(filter(None, (_text(f"{base}/bios_vendor"), _text(f"{base}/bios_version"))))


def _csv(text: str) -> list[list[str]]:
    return [
        [cell.strip() for cell in row]
        for row in csv.reader(text.splitlines(), skipinitialspace=True)
        if row
    ]


def _text(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read().strip()
    except OSError:
        return ""
