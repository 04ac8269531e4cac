# SPDX-License-Identifier: Apache-2.0
"""The tiny pair with eyes: the same text model and drafter behind a vision tower of one layer.

Random weights, as in ``tiny_pair.py``. An image becomes a few tokens whose positions have a row and
a column (M-RoPE), so that what follows it is at other positions than its place in the sequence.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tiny_pair import CHARACTERS, DRAFTER, HIDDEN, SPECIAL, TARGET, VOCAB, _drafter_weights

VISION_START, VISION_END, IMAGE, VIDEO = range(VOCAB - 4, VOCAB)
VISION_TOKENS = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
PATCH = 16
# An image of 64 by 96 pixels is two by three tokens, each of two by two patches.
VISION = {
    "model_type": "qwen3_5_vision",
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 2,
    "in_channels": 3,
    "patch_size": PATCH,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": HIDDEN,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [],
}
PREPROCESSOR = {
    "processor_class": "Qwen3VLProcessor",
    "image_processor_type": "Qwen2VLImageProcessor",
    "video_processor_type": "Qwen3VLVideoProcessor",
    "patch_size": PATCH,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "size": {"shortest_edge": (2 * PATCH) ** 2, "longest_edge": (8 * PATCH) ** 2},
    "image_mean": [0.5] * 3,
    "image_std": [0.5] * 3,
}


def write_tiny_vision_pair(root: Path, seed: int = 0) -> tuple[Path, Path]:
    """Write the pair under ``root``; returns the target's and the drafter's directory."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    target, drafter = root / "target", root / "drafter"
    config = {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "text_config": TARGET,
        "vision_config": VISION,
        "image_token_id": IMAGE,
        "video_token_id": VIDEO,
        "vision_start_token_id": VISION_START,
        "vision_end_token_id": VISION_END,
        "tie_word_embeddings": False,
        "dtype": "float32",
    }
    for directory, content in ((target, config), (drafter, DRAFTER)):
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "config.json").write_text(json.dumps(content, indent=1))
    for name in ("preprocessor_config.json", "video_preprocessor_config.json"):
        (target / name).write_text(json.dumps(PREPROCESSOR))
    _write_tokenizer(target)
    generator = torch.Generator().manual_seed(seed)
    model = AutoModelForImageTextToText.from_config(
        AutoConfig.from_pretrained(target), dtype=torch.float32
    )
    for name, parameter in model.named_parameters():
        if parameter.dim() >= 2:
            std = 0.4 if "conv" in name else 0.25
            parameter.data = torch.randn(parameter.shape, generator=generator) * std
        elif "A_log" in name or "dt_bias" in name:
            parameter.data = torch.rand(parameter.shape, generator=generator)
    save_file(
        {k: v.contiguous() for k, v in model.state_dict().items()}, target / "model.safetensors"
    )
    save_file(_drafter_weights(generator), drafter / "model.safetensors")
    return target, drafter


def _write_tokenizer(directory: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import Qwen2TokenizerFast

    visible = CHARACTERS[:-4].replace(" ", "\u0120").replace("\n", "\u010a")
    vocabulary = {token: i for i, token in enumerate([*SPECIAL, *visible, *VISION_TOKENS])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = [*SPECIAL[:4], *VISION_TOKENS]
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    Qwen2TokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<eos>",
        bos_token="<bos>",
        pad_token="<pad>",
        unk_token="<pad>",
    ).save_pretrained(directory)
