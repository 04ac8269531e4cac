# SPDX-License-Identifier: Apache-2.0
"""What is asked of the host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any


@dataclass(frozen=True)
class Request:
    """Attributes:
    cpu_only: no GPU is asked for.
    mode: native or container.
    python: interpreter that native mode makes its venv with.
    venv: native mode's; taken as it is unless `installs_venv`.
    tensor_parallel: GPUs of an instance as planned, 0 if there is no plan.
    shm_mib: of a container.
    ports: of the instances, each with the unit that may hold it: port, unit.
    gpu_free_mib: memory to be free on each planned GPU that no instance of ours uses.
    planned_gpus: their UUIDs; without a plan that names any, every GPU counts.
    memory_mib, cpus: least of the host.
    disk: room that is needed: path, mib, what; of a model also the model itself, the folder `partial`
        of what came of it so far, and the `record` of what was fetched; of a venv what is there once it
        is `made`; of an image its name `image`, the `digest` that its archive gives it and the `record`
        of those that were loaded, and `docker` where it is Docker that says in which folder.
    checkpoints: to be served: path, what (the variable that names it), and whether a role before the
        service comes with it.
    image: of container mode; `image_archive`: it is loaded from an archive of the controller.
    docker: Docker's client.
    controller_time: seconds since the epoch, 0 if unknown.
    max_skew_s: of the host's clock.
    driver_min: oldest version of the driver.
    vllm_version: of a venv that is taken as it is.
    installs_driver, starts_fabric_manager: a later role does that.
    cuda_timeout_s: of the initialisation.
    """

    cpu_only: bool = False
    mode: str = "native"
    python: str = "python3"
    venv: str = "/opt/ddtree/venv"
    installs_venv: bool = True
    tensor_parallel: int = 0
    shm_mib: int = 16384
    ports: Sequence[Mapping[str, Any]] = ()
    gpu_free_mib: int = 0
    planned_gpus: Sequence[str] = ()
    memory_mib: int = 4096
    cpus: int = 2
    disk: Sequence[Mapping[str, Any]] = ()
    checkpoints: Sequence[Mapping[str, Any]] = ()
    image: str = ""
    image_archive: bool = False
    docker: str = "docker"
    controller_time: float = 0.0
    max_skew_s: int = 60
    driver_min: str = "580"
    vllm_version: str = "0.32.0"
    installs_driver: bool = False
    starts_fabric_manager: bool = False
    cuda_timeout_s: int = 60
    systemd_min: int = 247
    own_units: Sequence[str] = field(default=("ddtree-vllm@",))


def request_from(data: Mapping[str, Any]) -> Request:
    """From plain data; None is the default."""
    known = {item.name for item in fields(Request)}
    return Request(
        **{key: value for key, value in data.items() if key in known and value is not None}
    )
