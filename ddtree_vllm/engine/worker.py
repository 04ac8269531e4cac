# SPDX-License-Identifier: Apache-2.0
"""Worker classes for ``--worker-cls``: vLLM's own, with the tree model runner inside."""

from __future__ import annotations

from unittest import mock

from vllm.config import VllmConfig
from vllm.v1.worker.gpu_worker import Worker
from vllm.v1.worker.worker_base import CompilationTimes

from ddtree_vllm.config import uses_trees
from ddtree_vllm.engine.requirements import check_supported


class DDTreeWorker(Worker):
    """GPU worker. Refuses, before it touches the device, what trees cannot serve exactly."""

    def __init__(self, vllm_config: VllmConfig, *args, **kwargs) -> None:
        check_supported(vllm_config)
        super().__init__(vllm_config, *args, **kwargs)

    def _make_model_runner(self):
        from ddtree_vllm.engine.model_runner import DDTreeModelRunner

        return DDTreeModelRunner(self.vllm_config, self.device)

    def compile_or_warm_up_model(self) -> CompilationTimes:
        # Where vLLM's own warm-up is off (--enforce-eager), so is ours.
        if uses_trees(self.vllm_config) and self.vllm_config.kernel_config.enable_jit_warmup:
            from ddtree_vllm.engine.warm_up import warm_up_mixed_batches

            warm_up_mixed_batches(self.model_runner, self.execute_model, self.sample_tokens)
        return super().compile_or_warm_up_model()


def _cpu_worker_class() -> type:
    # Importing vLLM's CPU worker loads CPU-only libraries, so it waits until a CPU worker is asked for.
    from vllm.v1.worker.cpu_worker import CPUWorker

    class DDTreeCPUWorker(CPUWorker):
        """CPU worker: the same engine, its Triton kernels run by the interpreter."""

        def __init__(self, vllm_config: VllmConfig, *args, **kwargs) -> None:
            check_supported(vllm_config)
            super().__init__(vllm_config, *args, **kwargs)

        def init_device(self) -> None:
            # CPUWorker names its runner class inside init_device and offers no other hook.
            from ddtree_vllm.engine.model_runner import DDTreeCPUModelRunner

            with mock.patch("vllm.v1.worker.cpu.model_runner.CPUModelRunner", DDTreeCPUModelRunner):
                super().init_device()

    DDTreeCPUWorker.__qualname__ = "DDTreeCPUWorker"
    return DDTreeCPUWorker


def __getattr__(name: str) -> type:
    if name == "DDTreeCPUWorker":
        worker = _cpu_worker_class()
        globals()[name] = worker
        return worker
    raise AttributeError(name)
