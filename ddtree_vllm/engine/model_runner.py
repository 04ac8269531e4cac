# SPDX-License-Identifier: Apache-2.0
"""vLLM's Runner V2 with the tree speculator in place of the chain's."""

from __future__ import annotations

import os
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput
from vllm.v1.worker.cpu.model_runner import CPUModelRunner
from vllm.v1.worker.gpu.async_utils import AsyncOutput
from vllm.v1.worker.gpu.model_runner import GPUModelRunner

from ddtree_vllm.engine.requirements import check_supported
from ddtree_vllm.engine.speculator import DDTreeSpeculator
from ddtree_vllm.engine.tree_metrics import FILE_VARIABLE, TreeCounters


class _TreeRunner:
    """What both runners add: ``init_speculator`` is a closed chain of ifs, so replace its result."""

    def _use_trees(self, vllm_config: VllmConfig, device: torch.device) -> None:
        check_supported(vllm_config)
        if vllm_config.speculative_config is not None and self.is_last_pp_rank:  # type: ignore[attr-defined]
            self.speculator = DDTreeSpeculator(vllm_config, device)
            # Every rank of a tensor-parallel engine walks the same trees; one of them counts.
            first = get_tensor_model_parallel_rank() == 0
            self._counters = TreeCounters(os.environ.get(FILE_VARIABLE) if first else None)
            self._counters.begin(self.speculator.budget, self.speculator.depth)

    def sample_tokens(self, grammar_output: Any) -> Any:
        output = super().sample_tokens(grammar_output)  # type: ignore[misc]
        if not isinstance(output, AsyncOutput) or not isinstance(self.speculator, DDTreeSpeculator):
            return output
        # One column more than tokens can fill: see tree_sampler.py. A step without drafts has one.
        if output.sampled_token_ids.shape[1] != self.speculator.budget + 2:
            return output
        return _CountingOutput(output, self._counters)


class _CountingOutput(AsyncModelRunnerOutput):
    """A step's output that also counts its walks, once they have reached the host."""

    def __init__(self, output: AsyncOutput, counters: TreeCounters) -> None:
        self._output = output
        self._counters = counters

    def get_output(self) -> ModelRunnerOutput:
        result = self._output.get_output()
        self._counters.count(self._output.sampled_token_ids[:, -1].tolist())
        return result


class DDTreeModelRunner(_TreeRunner, GPUModelRunner):
    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        super().__init__(vllm_config, device)
        self._use_trees(vllm_config, device)


class DDTreeCPUModelRunner(_TreeRunner, CPUModelRunner):
    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        super().__init__(vllm_config, device)
        self._use_trees(vllm_config, device)
