# SPDX-License-Identifier: Apache-2.0
"""Options that trees cannot serve end the start, before weights load, in a sentence that names them."""

from __future__ import annotations

import os
from typing import Any

import pytest
from tiny_pair import write_tiny_pair

REFUSED: dict[str, dict[str, Any]] = {
    "--pipeline-parallel-size": {"pipeline_parallel_size": 2},
    "--data-parallel-size": {"data_parallel_size": 2},
    "--decode-context-parallel-size": {
        "tensor_parallel_size": 2,
        "decode_context_parallel_size": 2,
    },
    "--prefill-context-parallel-size": {"prefill_context_parallel_size": 2},
    "--enable-batch-sharded-sampling": {
        "tensor_parallel_size": 2,
        "enable_batch_sharded_sampling": True,
    },
    "draft_tensor_parallel_size": {
        "tensor_parallel_size": 2,
        "speculative_config": {"draft_tensor_parallel_size": 1},
    },
    "draft_sample_method": {"speculative_config": {"draft_sample_method": "probabilistic"}},
    "rejection_sample_method": {"speculative_config": {"rejection_sample_method": "block"}},
    "--enable-lora": {"enable_lora": True},
    "--kv-transfer-config": {
        "kv_transfer_config": {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}
    },
    "--kv-offloading-size": {"kv_offloading_size": 1.0},
    "--ec-transfer-config": {
        "ec_transfer_config": {"ec_connector": "ECExampleConnector", "ec_role": "ec_both"}
    },
    "--weight-transfer-config": {"weight_transfer_config": {"backend": "nccl"}},
    "--cpu-offload-gb": {"cpu_offload_gb": 1},
    "--model-impl transformers": {"model_impl": "transformers"},
    "--quantization fp8_per_tensor": {"quantization": "fp8_per_tensor", "dtype": "bfloat16"},
    "--kv-cache-dtype fp8": {"kv_cache_dtype": "fp8"},
    "--kv-cache-dtype bfloat16": {"kv_cache_dtype": "bfloat16"},
    "--enable-sleep-mode": {"enable_sleep_mode": True},
    "--logits-processors": {"logits_processors": ["some.module:Processor"]},
    "--mamba-cache-mode all": {"mamba_cache_mode": "all"},
    "--mamba-ssm-cache-dtype bfloat16": {"mamba_ssm_cache_dtype": "bfloat16"},
    "--mamba-cache-dtype bfloat16": {"mamba_cache_dtype": "bfloat16"},
    "--watermark-config": {"watermark_config": {"algorithm": "gumbel", "key": 7}},
    "--enable-trace-replay": {"enable_trace_replay": True},
}


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> dict[str, Any]:
    target, drafter = write_tiny_pair(tmp_path_factory.mktemp("pair"))
    return {
        "model": str(target),
        "skip_tokenizer_init": True,
        "max_model_len": 256,
        "dtype": "float32",
        "speculative_config": {
            "method": "dflash",
            "model": str(drafter),
            "num_speculative_tokens": 15,
        },
        "additional_config": {"ddtree": {"budget": 15}},
    }


@pytest.mark.parametrize("option", REFUSED)
def test_a_start_is_refused_with_a_sentence(option, base, compatibility) -> None:
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"
    from vllm.engine.arg_utils import EngineArgs

    from ddtree_vllm.engine.requirements import check_supported

    changed = dict(REFUSED[option])
    changed["speculative_config"] = base["speculative_config"] | changed.get(
        "speculative_config", {}
    )
    with pytest.raises(ValueError) as refusal:
        check_supported(EngineArgs(**base | changed).create_engine_config())
    sentence = _sentence(refusal.value)
    assert sentence
    compatibility.record(option, f"refused: {sentence}")


def test_fp8_weights_are_accepted_but_not_compared_here(base, compatibility) -> None:
    """On a CPU vLLM has no kernels for them, with trees or without."""
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"
    from vllm.engine.arg_utils import EngineArgs

    from ddtree_vllm.engine.requirements import check_supported

    fp8 = {"quantization": "fp8", "dtype": "bfloat16"}
    check_supported(EngineArgs(**base | fp8).create_engine_config())
    compatibility.record("--quantization fp8", "accepted, not compared")


def _sentence(error: Exception) -> str:
    from ddtree_vllm.cli import _one_sentence

    return _one_sentence(error).removeprefix("ddtree-vllm cannot serve this: ").rstrip(".")
