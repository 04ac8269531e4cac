# SPDX-License-Identifier: Apache-2.0
"""What the start of an engine waits for: a free port, free GPU memory, and then readiness."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Sequence

from .errors import HealthError
from .server import Server
from .unit import Run, run_command

POLL_S = 0.5


def until_ready(
    server: Server,
    *,
    timeout_s: float,
    pid: int | None = None,
    alive: Callable[[int], bool] = lambda pid: os.path.isdir(f"/proc/{pid}"),
) -> float:
    """Waits for the first 200 of /health; returns the seconds that took.

    Args:
        pid: the engine's main process; the wait ends when it does.

    Raises:
        HealthError: the process ended, or the time is over.
    """
    began = time.monotonic()
    while True:
        if server.get("/health").status == 200:
            return time.monotonic() - began
        if pid is not None and not alive(pid):
            raise HealthError("the engine ended while it was starting; its log says why")
        if time.monotonic() - began > timeout_s:
            raise HealthError(f"the engine was not ready within {timeout_s:g} s")
        time.sleep(POLL_S)


def until_free(
    *,
    host: str,
    port: int,
    uuids: Sequence[str],
    free_mib: int,
    timeout_s: float,
    indices: Sequence[int] = (),
    run: Run = run_command,
) -> None:
    """Waits until nothing holds the port, and each GPU is there with memory free.

    A killed engine's workers can hold a GPU's memory for some seconds after the unit has stopped.

    Args:
        port: 0 does not look at the port.
        uuids: GPUs of the engine; empty looks at none.
        free_mib: memory that has to be free on each.
        indices: for an engine that is told its GPUs by index: the one that each has to have. A GPU
            that a boot did not find moves those behind it.

    Raises:
        HealthError: still taken when the time is over; names by what.
    """
    began = time.monotonic()
    while True:
        taken = [*_port_taken(host, port), *_gpus_taken(uuids, free_mib, indices, run)]
        if not taken:
            return
        if time.monotonic() - began > timeout_s:
            raise HealthError(f"{'; '.join(taken)}, still after {timeout_s:g} s")
        time.sleep(POLL_S)


def _port_taken(host: str, port: int) -> list[str]:
    if not port:
        return []
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        # As servers do: connections in TIME_WAIT do not count.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            return [f"port {port} of {host} is taken ({error.strerror})"]
    return []


def _gpus_taken(uuids: Sequence[str], free_mib: int, indices: Sequence[int], run: Run) -> list[str]:
    if not uuids:
        return []
    query = ["nvidia-smi", "--query-gpu=index,uuid,memory.free", "--format=csv,noheader,nounits"]
    try:
        lines = run(query).splitlines()
    except HealthError as error:
        return [str(error)]  # a driver that is still being loaded
    there = {}
    for line in lines:
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) == 3:
            there[cells[1]] = (cells[0], cells[2])
    taken = []
    for position, uuid in enumerate(uuids):
        if uuid not in there:
            taken.append(f"{uuid} is not there")
            continue
        index, free = there[uuid]
        if indices and index != str(indices[position]):
            taken.append(
                f"{uuid} has index {index} now and {indices[position]} in the plan: a new one is "
                "needed, which site.yml makes"
            )
        # An amount that the driver does not tell is none to wait for.
        if free.isdigit() and int(free) < free_mib:
            taken.append(f"{uuid} has {free} MiB free of {free_mib} needed")
    return taken
