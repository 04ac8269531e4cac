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
    "--enable-lora": {"enable_lora": True},
    "--kv-transfer-config": {
        "kv_transfer_config": {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}
    },
    "--kv-cache-dtype fp8": {"kv_cache_dtype": "fp8"},
    "--enable-sleep-mode": {"enable_sleep_mode": True},
    "--logits-processors": {"logits_processors": ["some.module:Processor"]},
    "--mamba-cache-mode all": {"mamba_cache_mode": "all"},
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

    with pytest.raises(ValueError) as refusal:
        check_supported(EngineArgs(**base, **REFUSED[option]).create_engine_config())
    sentence = _sentence(refusal.value)
    assert sentence
    compatibility.record(option, f"refused: {sentence}")


def _sentence(error: Exception) -> str:
    from ddtree_vllm.cli import _one_sentence

    return _one_sentence(error).removeprefix("ddtree-vllm cannot serve this: ").rstrip(".")
