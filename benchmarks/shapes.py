# SPDX-License-Identifier: Apache-2.0
"""The whole Qwen3.6-27B shape and its drafter's, as configurations for weights that are not read.

Dimensions: Qwen/Qwen3.6-27B revision 6a9e13b (text part) and z-lab/Qwen3.6-27B-DFlash.
"""

from __future__ import annotations

import json
from pathlib import Path

VOCAB = 248320
LAYERS = 64

TARGET = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "vocab_size": VOCAB,
    "hidden_size": 5120,
    "intermediate_size": 17408,
    "num_attention_heads": 24,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 262144,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "attn_output_gate": True,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 48,
    "mamba_ssm_dtype": "float32",
    "dtype": "bfloat16",
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e7,
        "partial_rotary_factor": 0.25,
        "mrope_interleaved": True,
        "mrope_section": [11, 11, 10],
    },
    "bos_token_id": 248044,
    "eos_token_id": 248044,
}

DRAFTER = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "vocab_size": VOCAB,
    "hidden_size": 5120,
    "intermediate_size": 17408,
    "num_hidden_layers": 5,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 262144,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
    "rope_theta": 1e7,
    "block_size": 16,
    "attention_bias": False,
    "layer_types": ["sliding_attention"] * 4 + ["full_attention"],
    "use_sliding_window": True,
    "sliding_window": 2048,
}


def write_shapes(root: Path, num_layers: int = LAYERS) -> tuple[Path, Path]:
    """Write both configurations; returns the target's and the drafter's directory.

    Args:
        num_layers: of the target; fewer than 64 for a quick look at kernels.
    """
    target = TARGET | {
        "num_hidden_layers": num_layers,
        "layer_types": [
            "full_attention" if (i + 1) % 4 == 0 else "linear_attention" for i in range(num_layers)
        ],
    }
    taps = [1, 16, 31, 46, 61] if num_layers == LAYERS else [1, num_layers // 2, num_layers - 3]
    drafter = DRAFTER | {
        "num_target_layers": num_layers,
        "dflash_config": {"mask_token_id": 248070, "target_layer_ids": taps},
    }
    for name, config in (("target", target), ("drafter", drafter)):
        (root / name).mkdir(parents=True, exist_ok=True)
        (root / name / "config.json").write_text(json.dumps(config, indent=1))
    return root / "target", root / "drafter"
