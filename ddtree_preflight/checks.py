# SPDX-License-Identifier: Apache-2.0
"""Every check, in the order of the report."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from . import driver, gpus, ports, service, system
from .host import Host
from .report import Finding, refuse
from .request import Request

Check = Callable[[Host, Request], Iterator[Finding]]

CHECKS: tuple[Check, ...] = (
    system.check_user,
    system.check_release,
    system.check_systemd,
    system.check_python,
    system.check_vllm,
    system.check_memory,
    system.check_shm,
    system.check_disk,
    system.check_clock,
    system.check_packages,
    ports.check_ports,
    service.check_venv,
    service.check_checkpoints,
    service.check_image,
    driver.check_driver,
    driver.check_cuda,
    driver.check_fabric,
    driver.check_upgrades,
)


def run(request: Request, host: Host, faults: gpus.Faults | None = None) -> list[Finding]:
    """All findings. A check that cannot be carried out is itself a refusal, and no other is left "
    "out."""

    def check_gpus(host: Host, request: Request) -> Iterator[Finding]:
        return gpus.check_gpus(host, request, faults)

    found: list[Finding] = []
    for check in (*CHECKS, check_gpus):
        try:
            found.extend(check(host, request))
        except Exception as error:  # whatever it is, the operator sees the rest too
            name = check.__name__.replace("check_", "")
            found.append(refuse(name, f"cannot be checked: {type(error).__name__}: {error}"))
    return found
