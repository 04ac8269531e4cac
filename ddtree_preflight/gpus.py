# SPDX-License-Identifier: Apache-2.0
"""Each GPU: well, with its memory free, and usable by a process of ours."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator

from . import driver
from .host import Host
from .report import Finding, passed, refuse, warn
from .request import Request

_QUERY = ("index", "uuid", "memory.free", "persistence_mode", "compute_mode", "compute_cap", "name")
CAPABILITIES = ("8.0", "8.6", "8.9", "9.0", "12.0")
"""Compute capabilities that the engine serves on; it refuses others at its start."""
# Text of `nvidia-smi -q` -> faults of each GPU by bus address.
Faults = Callable[[str], dict[str, list[str]]]


def check_gpus(host: Host, request: Request, faults: Faults | None = None) -> Iterator[Finding]:
    if request.cpu_only or not driver.look(host).answers:
        return
    asked = host.run(
        "nvidia-smi", f"--query-gpu={','.join(_QUERY)}", "--format=csv,noheader,nounits"
    )
    rows = [
        {key: cell.strip() for key, cell in zip(_QUERY, row)}  # noqa: B905 (Python 3.9)
        for row in csv.reader(asked.out.splitlines(), skipinitialspace=True)
        if asked.status == 0 and len(row) == len(_QUERY)
    ]
    if not rows:
        yield refuse("gpus", f"nvidia-smi lists no GPU ({asked.said}): does `lspci` show one?")
        return
    yield from _memory(host, request, rows)
    yield from _capability(rows)
    for row in rows:
        if row["compute_mode"] == "Prohibited":
            yield refuse(
                "gpus",
                f"GPU {row['index']} lets no process compute: `nvidia-smi -i {row['index']} -c "
                "DEFAULT`",
            )
    off = [row["index"] for row in rows if row["persistence_mode"] == "Disabled"]
    if off:
        yield warn(
            "gpus",
            f"persistence mode is off on GPU {', '.join(off)}, so that the driver is loaded anew "
            "at each start; the "
            "role nvidia_host turns it on",
        )
    if faults is not None:
        details = host.run("nvidia-smi", "-q")
        for bus, sentences in sorted(faults(details.out).items() if details.status == 0 else ()):
            for sentence in sentences:
                if sentence.endswith("not Completed"):
                    continue  # the fabric's own check knows whether its manager is yet to start
                # Heat passes; what does not, ddtree-health tells of the running service.
                say = warn if sentence.startswith("it is slowed down") else refuse
                yield say("gpus", f"GPU {bus}: {sentence}")
    yield passed("gpus", f"{len(rows)} GPUs")


def _capability(rows: list[dict[str, str]]) -> Iterator[Finding]:
    """Beside a GPU that serves, another may drive a screen: the plan leaves it out."""
    strange = [row for row in rows if row["compute_cap"] not in CAPABILITIES]
    say = refuse if len(strange) == len(rows) else warn
    for row in strange:
        yield say(
            "gpus",
            f"GPU {row['index']}, {row['name']}, has compute capability {row['compute_cap']}: "
            f"draft trees run on {', '.join(CAPABILITIES[:-1])} and {CAPABILITIES[-1]}",
        )


def _memory(host: Host, request: Request, rows: list[dict[str, str]]) -> Iterator[Finding]:
    """A killed server's workers can hold memory that no unit of ours accounts for."""
    if not request.gpu_free_mib:
        return
    used = set()
    apps = host.run("nvidia-smi", "--query-compute-apps=gpu_uuid,pid", "--format=csv,noheader")
    for line in apps.out.splitlines() if apps.status == 0 else ():
        uuid, _, pid = line.partition(",")
        group = host.read(f"/proc/{pid.strip()}/cgroup")
        if any(own.rstrip("@") in group for own in request.own_units):
            used.add(uuid.strip())
    for row in rows:
        if request.planned_gpus and row["uuid"] not in request.planned_gpus:
            continue  # beside those that serve, another may do something else
        free = row["memory.free"]
        if row["uuid"] in used or not free.isdigit() or int(free) >= request.gpu_free_mib:
            continue
        yield refuse(
            "gpus",
            f"GPU {row['index']} has {free} MiB free of {request.gpu_free_mib} needed: "
            "`nvidia-smi` shows what holds "
            "the rest; without a process there, a driver that was killed does, and the GPU has to "
            "be reset",
        )
