# SPDX-License-Identifier: Apache-2.0
"""Compiles the project's kernels for a GPU that need not be there, as the launchers launch them.

    python compile_for_gpu.py 8.9 101376 [--everything]

Triton compiles ahead of time when a driver names the target: this one does, and every launch stops
after compiling. Prints a line of JSON for each kernel compiled. Must run without `TRITON_INTERPRET`,
which Triton reads when a kernel is decorated: hence a process of its own.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


class StandInDriver(DriverBase):
    """Says that a GPU of this compute capability is there."""

    def __init__(self, capability: tuple[int, int]) -> None:
        super().__init__()
        self.capability = capability

    @classmethod
    def is_active(cls) -> bool:
        return True

    def get_current_target(self) -> GPUTarget:
        major, minor = self.capability
        return GPUTarget("cuda", 10 * major + minor, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("meta")

    def map_python_to_cpp_type(self, ty: str) -> str:
        return ty

    def get_benchmarker(self) -> Any:
        raise NotImplementedError("there is nothing to time")


def stand_in(capability: tuple[int, int], shared_memory: int) -> None:
    """Has Triton compile for this GPU, and the launchers choose tiles for it."""
    driver.set_active(StandInDriver(capability))
    properties = SimpleNamespace(
        multi_processor_count=100, shared_memory_per_block_optin=shared_memory
    )
    torch.cuda.get_device_capability = lambda device=None: capability
    torch.cuda.get_device_properties = lambda device=None: properties


def usage(cubin: bytes) -> tuple[int, int]:
    """Registers of a thread, and the bytes of its stack, which hold the registers it spills."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        told = subprocess.run(
            [CUOBJDUMP, "--dump-resource-usage", file.name],
            check=True,
            capture_output=True,
            text=True,
            timeout=60,
        ).stdout
    [found] = re.findall(r"REG:(\d+) STACK:(\d+)", told)
    return int(found[0]), int(found[1])


def main(capability: str, shared_memory: str, *options: str) -> None:
    major, minor = capability.split(".")
    stand_in((int(major), int(minor)), int(shared_memory))
    launch_name = ""
    told = set()
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        if kernel.hash not in told:
            told.add(kernel.hash)
            registers, spilled = usage(kernel.asm["cubin"])
            report = {
                "launch": launch_name,
                "kernel": self.fn.__name__,
                "tile": {name: value for name, value in kwargs.items() if "BLOCK" in name},
                "num_warps": kernel.metadata.num_warps,
                "num_stages": kernel.metadata.num_stages,
                "shared_memory": kernel.metadata.shared,
                "registers": registers,
                "spilled": spilled,
                # The instructions of programmatic dependent launch, and the launch's permission.
                "waits_or_signals": "griddepcontrol" in kernel.asm["ptx"],
                "may_start_early": kernel.metadata.launch_pdl,
            }
            print(json.dumps(report), flush=True)
        return kernel

    JITFunction.run = compile_only
    # Only now, so that the kernels are decorated in the Triton prepared above.
    from qwen_27b import launches

    for name, launch in launches("--everything" in options):
        launch_name = name
        launch()


if __name__ == "__main__":
    main(*sys.argv[1:])
