# SPDX-License-Identifier: Apache-2.0
"""How many tree rows a step can hold, and what is refused before weights load because of it."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from ddtree_preflight import gpus
from ddtree_vllm.engine import requirements
from ddtree_vllm.engine.rows import max_tree_rows, rows_that_fit
from ddtree_vllm.gdn import launch


def config(most: int, budget: int, schedule=None, tokens: int = 8192):
    return SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_seqs=most, max_num_batched_tokens=tokens),
        speculative_config=SimpleNamespace(num_speculative_tokens_per_batch_size=schedule),
        num_speculative_tokens=budget,
    )


@pytest.mark.parametrize(
    ("schedule", "rows"),
    [
        (None, 16 * 64),
        # A batch may carry the drafts it was given one step ago and, beside, every newcomer's root.
        ([[1, 1, 63], [2, 16, 15]], 16 + 16 * 16),
        ([[1, 1, 63], [2, 2, 15]], 16 + 16 * 16),  # the last entry goes on
        ([[1, 1, 63], [9, 16, 3]], 16 + 8 * 64),  # and so does the one before a gap
        ([[1, 64, 31]], 16 + 16 * 32),
        ([[1, 16, 127]], 16 + 16 * 64),  # no more than the budget
    ],
)
def test_the_stash_holds_the_largest_batch_of_every_budget(schedule, rows) -> None:
    assert max_tree_rows(config(16, 63, schedule)) == rows


def test_no_step_has_more_rows_than_tokens() -> None:
    assert max_tree_rows(config(256, 63, tokens=2048)) == 2048


class StandInGpu:
    """What vLLM's platform says of a GPU that is not there."""

    def __init__(self, capability=(9, 0), gigabytes=150) -> None:
        from vllm.platforms.interface import DeviceCapability

        self.capability = DeviceCapability(*capability)
        self.gigabytes = gigabytes

    def get_device_capability(self):
        return self.capability

    def get_device_total_memory(self):
        return int(self.gigabytes * 1e9)


def big_model(most: int, budget: int, tokens: int):
    """The 27B shape: 48 recurrent layers, 2.4 MB a row."""
    made = config(most, budget, tokens=tokens)
    text = SimpleNamespace(
        layer_types=["linear_attention"] * 48 + ["full_attention"] * 16,
        linear_num_key_heads=16,
        linear_num_value_heads=48,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
    )
    made.model_config = SimpleNamespace(hf_text_config=text, dtype=torch.bfloat16)
    made.parallel_config = SimpleNamespace(tensor_parallel_size=1)
    made.cache_config = SimpleNamespace(gpu_memory_utilization=0.92)
    return made


def test_a_stand_in_gpu_too_small_for_the_stash_is_refused_with_both_sizes(monkeypatch) -> None:
    monkeypatch.setattr(requirements, "current_platform", StandInGpu(gigabytes=24))
    monkeypatch.setattr(launch, "interpreting", lambda: False)
    [reason] = requirements._gpu_reasons(big_model(256, 63, tokens=16384))
    # 39.0 GB of rows, and two 64 x 64 factors of each of 256 requests and 48 heads.
    assert "39.4 GB" in reason
    assert "a GPU of 24 GB" in reason
    assert "--max-num-seqs or --budget" in reason
    assert not list(requirements._gpu_reasons(big_model(16, 15, tokens=16384)))


@pytest.mark.parametrize("capability", [(7, 5), (8, 7), (10, 0), (10, 3), (12, 1)])
def test_a_stand_in_gpu_of_another_capability_is_refused_with_those_that_serve(
    monkeypatch, capability
) -> None:
    monkeypatch.setattr(requirements, "current_platform", StandInGpu(capability=capability))
    [reason] = requirements._gpu_reasons(big_model(4, 15, tokens=2048))
    assert f"compute capability {capability[0]}.{capability[1]};" in reason
    assert "use one of 8.0, 8.6, 8.9, 9.0 or 12.0, or serve without trees" in reason


@pytest.mark.parametrize("capability", gpus.CAPABILITIES)
def test_a_stand_in_gpu_that_preflight_lets_pass_is_served(monkeypatch, capability) -> None:
    major, minor = map(int, capability.split("."))
    monkeypatch.setattr(requirements, "current_platform", StandInGpu(capability=(major, minor)))
    assert not list(requirements._gpu_reasons(big_model(4, 15, tokens=2048)))
    assert len(gpus.CAPABILITIES) == len(requirements.SUPPORTED_GPUS)


@pytest.mark.parametrize("budget", [0, 200])
def test_a_budget_out_of_range_is_no_traceback_on_a_stand_in_gpu(monkeypatch, budget) -> None:
    monkeypatch.setattr(requirements, "current_platform", StandInGpu())
    assert not list(requirements._gpu_reasons(big_model(4, budget, tokens=2048)))


def test_another_architecture_is_no_traceback_on_a_stand_in_gpu(monkeypatch) -> None:
    monkeypatch.setattr(requirements, "current_platform", StandInGpu())
    model = big_model(4, 15, tokens=2048)
    del model.model_config.hf_text_config.linear_num_value_heads
    assert not list(requirements._gpu_reasons(model))


@pytest.mark.parametrize(
    ("sizes", "reason"),
    [
        ({"head_dim": 96}, "attention heads of 96"),
        ({"linear_key_head_dim": 96}, "key heads of 96"),
        ({"linear_value_head_dim": 256}, "value heads of 256"),
    ],
)
def test_head_sizes_without_a_kernel_are_refused(sizes, reason) -> None:
    [told] = requirements._kernel_reasons(SimpleNamespace(**sizes))
    assert reason in told


@pytest.mark.parametrize(
    ("num_rows", "capacity", "fit"),
    [
        ([4, 0, 4], 8, [4, 0, 4]),
        ([4, 0, 4], 7, [4, 0, 3]),
        ([4, 4, 4], 6, [4, 1, 1]),
        ([4, 4, 4], 3, [1, 1, 1]),
        ([64, 64], 68, [64, 4]),
        ([0, 0], 0, [0, 0]),
        ([], 8, []),
    ],
)
def test_trees_are_cut_to_the_stash_and_every_root_is_kept(num_rows, capacity, fit) -> None:
    found = rows_that_fit(np.array(num_rows, dtype=np.int32), capacity)
    assert found.tolist() == fit
    assert found.dtype == np.int32
