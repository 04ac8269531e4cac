# SPDX-License-Identifier: Apache-2.0
"""A hybrid target and a DFlash drafter of random weights over a vocabulary of a few dozen tokens.

With so few tokens a tree of some dozen nodes often contains what the target says, on branches as
often as on the spine, although neither model has learnt anything: every part of a step is exercised
within seconds. The demo pair in ``demo/`` is the trained one.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

VOCAB = 40
HIDDEN = 64
BLOCK_SIZE = 16
MASK_TOKEN = 3
EOS_TOKEN = 2
# The tokenizer: four special tokens, two around thinking, and a character for every other token.
THINK_TOKEN = 4
END_OF_THINKING_TOKEN = 5
SPECIAL = ["<pad>", "<bos>", "<eos>", "<mask>", "<think>", "</think>"]
CHARACTERS = '{}[]":,- \n0123456789abcdefghijklmn'

TARGET = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "attn_output_gate": True,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "mamba_ssm_dtype": "float32",
    "dtype": "float32",
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
        "mrope_interleaved": True,
        "mrope_section": [6, 5, 5],
    },
    "bos_token_id": 1,
    "eos_token_id": EOS_TOKEN,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
}

DRAFTER = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "dtype": "float32",
    "rope_theta": 10000.0,
    "block_size": BLOCK_SIZE,
    "num_target_layers": 4,
    "attention_bias": False,
    # Like the real drafter of Qwen3.6-27B: sliding layers, then one full layer.
    "layer_types": ["sliding_attention", "full_attention"],
    "use_sliding_window": True,
    "sliding_window": 64,
    "dflash_config": {"mask_token_id": MASK_TOKEN, "target_layer_ids": [0, 1, 2]},
}


def write_tiny_pair(root: Path, seed: int = 0) -> tuple[Path, Path]:
    """Write the pair under ``root``; returns the target's and the drafter's directory."""
    from transformers import AutoConfig, AutoModelForCausalLM

    target, drafter = root / "target", root / "drafter"
    for directory, config in ((target, TARGET), (drafter, DRAFTER)):
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "config.json").write_text(json.dumps(config, indent=1))
    generator = torch.Generator().manual_seed(seed)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.from_pretrained(target), dtype=torch.float32
    )
    for name, parameter in model.named_parameters():
        if parameter.dim() >= 2:
            # Large enough that the argmax is not a matter of rounding and depends on the context.
            std = 0.4 if "conv" in name else 0.25
            parameter.data = torch.randn(parameter.shape, generator=generator) * std
        elif "A_log" in name or "dt_bias" in name:
            parameter.data = torch.rand(parameter.shape, generator=generator)
    save_file(
        {k: v.contiguous() for k, v in model.state_dict().items()}, target / "model.safetensors"
    )
    save_file(_drafter_weights(generator), drafter / "model.safetensors")
    write_tokenizer(target)
    return target, drafter


def write_tokenizer(directory: Path) -> None:
    """A byte-level tokenizer of one character a token, for the tiny target."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    # Byte-level vocabularies write a space and a line end as these.
    visible = CHARACTERS.replace(" ", "\u0120").replace("\n", "\u010a")
    vocabulary = {token: i for i, token in enumerate([*SPECIAL, *visible])}
    assert len(vocabulary) == VOCAB
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL[:4]])
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in SPECIAL[4:]])
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<eos>", bos_token="<bos>", pad_token="<pad>"
    ).save_pretrained(directory)


def _drafter_weights(generator: torch.Generator) -> dict[str, torch.Tensor]:
    def rand(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * 0.15

    heads, kv = DRAFTER["num_attention_heads"], DRAFTER["num_key_value_heads"]
    dim, inter = DRAFTER["head_dim"], DRAFTER["intermediate_size"]
    features = len(DRAFTER["dflash_config"]["target_layer_ids"])
    weights = {
        "fc.weight": rand(HIDDEN, features * HIDDEN),
        "hidden_norm.weight": torch.ones(HIDDEN),
        "norm.weight": torch.ones(HIDDEN),
    }
    for i in range(DRAFTER["num_hidden_layers"]):
        p = f"layers.{i}."
        weights |= {
            p + "self_attn.q_proj.weight": rand(heads * dim, HIDDEN),
            p + "self_attn.k_proj.weight": rand(kv * dim, HIDDEN),
            p + "self_attn.v_proj.weight": rand(kv * dim, HIDDEN),
            p + "self_attn.o_proj.weight": rand(HIDDEN, heads * dim),
            p + "self_attn.q_norm.weight": torch.ones(dim),
            p + "self_attn.k_norm.weight": torch.ones(dim),
            p + "input_layernorm.weight": torch.ones(HIDDEN),
            p + "post_attention_layernorm.weight": torch.ones(HIDDEN),
            p + "mlp.gate_proj.weight": rand(inter, HIDDEN),
            p + "mlp.up_proj.weight": rand(inter, HIDDEN),
            p + "mlp.down_proj.weight": rand(HIDDEN, inter),
        }
    return weights
