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
    run: Run = run_command,
) -> None:
    """Waits until nothing holds the port, and each GPU has memory free.

    A killed engine's workers can hold a GPU's memory for some seconds after the unit has stopped.

    Args:
        port: 0 does not look at the port.
        uuids: GPUs of the engine; empty does not look at memory.
        free_mib: memory that has to be free on each.

    Raises:
        HealthError: still taken when the time is over; names by what.
    """
    began = time.monotonic()
    while True:
        taken = [*_port_taken(host, port), *_memory_taken(uuids, free_mib, run)]
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


def _memory_taken(uuids: Sequence[str], free_mib: int, run: Run) -> list[str]:
    if not uuids or not free_mib:
        return []
    query = ["nvidia-smi", "--query-gpu=uuid,memory.free", "--format=csv,noheader,nounits"]
    free = {}
    for line in run(query).splitlines():
        uuid, _, amount = line.partition(",")
        if amount.strip().isdigit():
            free[uuid.strip()] = int(amount)
    taken = []
    for uuid in uuids:
        if uuid not in free:
            taken.append(f"{uuid} is not there")
        elif free[uuid] < free_mib:
            taken.append(f"{uuid} has {free[uuid]} MiB free of {free_mib} needed")
    return taken
