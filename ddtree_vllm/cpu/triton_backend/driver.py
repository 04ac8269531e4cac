# SPDX-License-Identifier: Apache-2.0
"""The idle driver: vLLM's Runner V2 wants Triton to have an active one, and launches nothing."""

from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase


class IdleDriver(DriverBase):
    """Answers Triton's questions about the device: the CPU, through torch."""

    @classmethod
    def is_active(cls) -> bool:
        """Active exactly when no GPU is, as Triton wants one active driver in all."""
        import torch

        return not torch.cuda.is_available()

    def map_python_to_cpp_type(self, ty: str) -> str:
        return ty

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cpu", 0, 1)

    # A launch outside the interpreter asks for these two first, then meets the compiler's refusal.
    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self):
        import torch

        return torch.device("cpu")

    def get_benchmarker(self):
        from triton.testing import do_bench

        return do_bench
