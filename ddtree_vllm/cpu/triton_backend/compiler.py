# SPDX-License-Identifier: Apache-2.0
"""The backend's compiler half: there is none, and it says so."""

from triton.backends.compiler import BaseBackend, GPUTarget


class NoCompiler(BaseBackend):
    """Refuses every kernel: on the CPU, kernels run through Triton's interpreter."""

    @staticmethod
    def supports_target(target: GPUTarget) -> bool:
        return target.backend == "cpu"

    def hash(self) -> str:
        return "ddtree-vllm-cpu"

    def parse_options(self, options: dict) -> object:
        raise RuntimeError(
            "No GPU here, so Triton kernels run only through Triton's interpreter: set "
            "TRITON_INTERPRET=1 in the environment before starting (ddtree-vllm serve does)."
        )

    def add_stages(self, stages: dict, options: object) -> None:
        self.parse_options({})

    def load_dialects(self, context) -> None:
        self.parse_options({})

    def get_module_map(self) -> dict:
        return {}
