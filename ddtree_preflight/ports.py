# SPDX-License-Identifier: Apache-2.0
"""Ports that something else listens on."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

from .host import Host
from .report import Finding, passed, refuse
from .request import Request

_LISTEN = "0A"


def check_ports(host: Host, request: Request) -> Iterator[Finding]:
    if not request.ports:
        return
    listening = _listening(host)
    free = []
    for item in request.ports:
        port, unit = int(item["port"]), str(item.get("unit") or "")
        if port not in listening or (unit and _is_up(host, unit)):
            free.append(str(port))
            continue
        owner = _owner(host, listening[port])
        yield refuse(
            "ports",
            f"port {port} is taken by {owner}: stop that, or set another gpu_topology_first_port",
        )
    if free:
        yield passed("ports", f"free: {', '.join(free)}")


def _is_up(host: Host, unit: str) -> bool:
    """Its own instance may listen."""
    state = host.run("systemctl", "show", "--property=ActiveState", "--value", unit)
    return state.status == 0 and state.out.strip() not in ("", "inactive", "failed")


def _listening(host: Host) -> dict[int, str]:
    """Port -> inode of the socket."""
    found = {}
    for name in ("tcp", "tcp6"):
        for line in host.read(f"/proc/net/{name}").splitlines()[1:]:
            cells = line.split()
            if len(cells) > 9 and cells[3] == _LISTEN:
                found[int(cells[1].rpartition(":")[2], 16)] = cells[9]
    return found


def _owner(host: Host, inode: str) -> str:
    for pid in host.names("/proc"):
        if not pid.isdigit():
            continue
        for descriptor in host.names(f"/proc/{pid}/fd"):
            try:
                target = os.readlink(host.path(f"/proc/{pid}/fd/{descriptor}"))
            except OSError:
                continue
            if re.fullmatch(rf"socket:\[{inode}\]", target):
                return f"{host.read(f'/proc/{pid}/comm').strip()} (pid {pid})"
    return "a process that cannot be seen"
