# SPDX-License-Identifier: Apache-2.0
"""Makes the tree's kernels runnable on a machine without a GPU.

Triton decides at import whether its kernels are compiled or interpreted, so `TRITON_INTERPRET` has
to be set before `triton` is imported for the first time. The modules of this package import this
one first: a tool that only wants a draft tree need not know about the variable.
"""

import os
import sys

import torch


def interpret_without_gpu() -> None:
    """Chooses Triton's interpreter where there is no CUDA device and the choice is still open."""
    if "triton" not in sys.modules and not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")


interpret_without_gpu()

import triton.language as tl  # noqa: E402
from triton.runtime.interpreter import InterpretedFunction  # noqa: E402

# Triton's own helpers (tl.max, ...) were decorated when it was imported, which settles the mode for
# every kernel that calls them.
INTERPRETED: bool = isinstance(tl.max, InterpretedFunction)


def require_runnable(tensor: torch.Tensor, name: str) -> None:
    """Raises RuntimeError when no kernel can read `tensor` in this process."""
    if tensor.device.type == "cpu" and not INTERPRETED:
        raise RuntimeError(
            f"{name} is on the CPU, where Triton kernels run only in the interpreter: set "
            "TRITON_INTERPRET=1 before Triton is first imported, or move the tensor to a GPU."
        )


def requests_per_program(num_requests: int) -> int:
    """Tile height of kernels that treat requests independently.

    A GPU runs one request per program. The interpreter pays per operation, whatever its size, so
    there one program takes up to 64 requests at once.
    """
    if not INTERPRETED:
        return 1
    return min(64, 1 << max(0, num_requests - 1).bit_length())
