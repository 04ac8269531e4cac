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

from ddtree_vllm.engine.prompt_logprobs import TreePromptLogprobsWorker
from ddtree_vllm.engine.requirements import check_supported
from ddtree_vllm.engine.speculator import DDTreeSpeculator
from ddtree_vllm.engine.tree_metrics import FILE_VARIABLE, TreeCounters
from ddtree_vllm.gdn.operator import split_graphs_at_operator


class _TreeRunner:
    """What both runners add: ``init_speculator`` is a closed chain of ifs, so replace its result."""

    def _use_trees(self, vllm_config: VllmConfig, device: torch.device) -> None:
        check_supported(vllm_config)
        split_graphs_at_operator(vllm_config.compilation_config)
        if vllm_config.speculative_config is not None and self.is_last_pp_rank:  # type: ignore[attr-defined]
            self.speculator = DDTreeSpeculator(vllm_config, device)
            # Every rank of a tensor-parallel engine walks the same trees; one of them counts.
            first = get_tensor_model_parallel_rank() == 0
            self._counters = TreeCounters(os.environ.get(FILE_VARIABLE) if first else None)
            self._counters.begin(self.speculator.budget, self.speculator.depth)

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)  # type: ignore[misc]
        if self.prompt_logprobs_worker is not None and isinstance(  # type: ignore[has-type]
            self.speculator, DDTreeSpeculator
        ):
            self.prompt_logprobs_worker = TreePromptLogprobsWorker(
                self.max_num_reqs,  # type: ignore[attr-defined]
                self.device,  # type: ignore[attr-defined]
                logprobs_mode=self.model_config.logprobs_mode,  # type: ignore[attr-defined]
            )

    def gather_batch_req_state(self, scheduler_output: Any, dummy_run: bool) -> Any:
        """A prompt of one token that joins a batch of trees is verified as a tree, not prefilled.

        vLLM 0.32 pads such a prompt with drafts, as many as a tree has, so that the batch stays
        uniform, and its runner then takes all of these rows for the prompt: the recurrent state
        would follow tokens that nobody said. A prompt's last token behind cached ones it already
        runs as a decode; this is that rule without the cached ones (`DDTreeModelState` clears the
        state that a decode would start from).
        """
        state, uniform = super().gather_batch_req_state(scheduler_output, dummy_run)  # type: ignore[misc]
        if state is None or state.num_draft_tokens_np is None or not state.has_prefill:
            return state, uniform
        padded = state.is_prefilling_np & (state.num_draft_tokens_np > 0)
        return state._replace(
            prefill_runs_as_decode_np=state.prefill_runs_as_decode_np | padded
        ), uniform

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
