# SPDX-License-Identifier: Apache-2.0
"""The drafter: DFlash (arXiv 2602.06036) as vLLM runs it, in plain PyTorch.

One pass drafts a block. Its queries are the last sampled token at position p and mask tokens at
p+1 .. p+15; each mask position predicts the token at its own position. The context is not embedded
tokens but the target's residual streams at positions < p: concatenated over `target_layer_ids`,
projected by `fc`, normed, then projected to keys and values by every layer. Embedding and output
head are the target's.

Full-attention layers see the whole context and the whole block; sliding layers see the last
`sliding_window` positions and are causal inside the block (vLLM's default for
`layer_types[i] == "sliding_attention"`).
"""

import json
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import nn

from demo_pair.target import rotate

BLOCK_SIZE = 16


def config(target: dict, *, mask: int, target_layer_ids: tuple[int, ...] = (1, 2, 3)) -> dict:
    """The checkpoint's config.json: one sliding and one full layer, as Qwen3.6's drafter mixes."""
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "vocab_size": target["vocab_size"],
        "hidden_size": target["hidden_size"],
        "intermediate_size": 768,
        "num_hidden_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 128,
        "use_sliding_window": True,
        "max_window_layers": 0,
        # Keys and values take the room of the target's (2 heads of 256), so that one page size
        # serves both caches.
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000},
        "max_position_embeddings": target["max_position_embeddings"],
        "tie_word_embeddings": False,
        "attention_bias": False,
        "block_size": BLOCK_SIZE,
        "num_target_layers": target["num_hidden_layers"],
        "dflash_config": {"mask_token_id": mask, "target_layer_ids": list(target_layer_ids)},
        "eos_token_id": target["eos_token_id"],
        "dtype": "bfloat16",
    }


class _Attention(nn.Module):
    def __init__(self, c: dict):
        super().__init__()
        if c["num_attention_heads"] != c["num_key_value_heads"]:
            raise ValueError("The drafter here has as many key heads as query heads.")
        self.head_dim = c["head_dim"]
        size, width = c["hidden_size"], c["num_attention_heads"] * c["head_dim"]
        self.q_proj = nn.Linear(size, width, bias=False)
        self.k_proj = nn.Linear(size, width, bias=False)
        self.v_proj = nn.Linear(size, width, bias=False)
        self.o_proj = nn.Linear(width, size, bias=False)
        self.q_norm = nn.RMSNorm(self.head_dim, eps=c["rms_norm_eps"])
        self.k_norm = nn.RMSNorm(self.head_dim, eps=c["rms_norm_eps"])

    def _heads(self, x):
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def queries(self, x, cos, sin):
        q = self.q_norm(self._heads(self.q_proj(x)).float())
        return rotate(q, cos, sin)

    def keys_values(self, x, cos, sin):
        k = self.k_norm(self._heads(self.k_proj(x)).float())
        return rotate(k, cos, sin), self._heads(self.v_proj(x))


class _Mlp(nn.Module):
    def __init__(self, c: dict):
        super().__init__()
        self.gate_proj = nn.Linear(c["hidden_size"], c["intermediate_size"], bias=False)
        self.up_proj = nn.Linear(c["hidden_size"], c["intermediate_size"], bias=False)
        self.down_proj = nn.Linear(c["intermediate_size"], c["hidden_size"], bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class _Layer(nn.Module):
    def __init__(self, c: dict, layer_type: str):
        super().__init__()
        self.window = c["sliding_window"] if layer_type == "sliding_attention" else None
        self.self_attn = _Attention(c)
        self.mlp = _Mlp(c)
        self.input_layernorm = nn.RMSNorm(c["hidden_size"], eps=c["rms_norm_eps"])
        self.post_attention_layernorm = nn.RMSNorm(c["hidden_size"], eps=c["rms_norm_eps"])


class DFlashDrafter(nn.Module):
    """Parameter names are the checkpoint's."""

    def __init__(self, settings: dict):
        super().__init__()
        dflash = settings["dflash_config"]
        self.block_size = settings["block_size"]
        self.mask_token_id = dflash["mask_token_id"]
        self.target_layer_ids = dflash["target_layer_ids"]
        size, eps = settings["hidden_size"], settings["rms_norm_eps"]
        self.fc = nn.Linear(len(self.target_layer_ids) * size, size, bias=False)
        self.hidden_norm = nn.RMSNorm(size, eps=eps)
        self.layers = nn.ModuleList(_Layer(settings, t) for t in settings["layer_types"])
        self.norm = nn.RMSNorm(size, eps=eps)
        half = settings["head_dim"] // 2
        frequencies = settings["rope_parameters"]["rope_theta"] ** -(torch.arange(half) / half)
        self.register_buffer("frequencies", frequencies, persistent=False)

    def _cos_sin(self, positions):
        angles = positions[..., None].float() * self.frequencies
        return angles.cos(), angles.sin()

    def forward(self, streams, anchors, anchor_embeddings, mask_embedding):
        """Drafts blocks after many anchors of each sequence at once.

        Args:
            streams: the target's residual streams over the sequence, a list of [B, T, H] indexed by
                target layer (as `target.forward` returns them).
            anchors: int64 [B, A], the position p of the last sampled token of each block: context
                is every position < p. T need not reach p.
            anchor_embeddings: [B, A, H], the embeddings of the tokens at the anchors.
            mask_embedding: [H].

        Returns:
            [B, A, block_size - 1, H], normed: `lm_head` of entry i scores the token at p + 1 + i.
        """
        batch, count = anchors.shape
        length = streams[0].shape[1]
        size = self.block_size
        context = torch.cat([streams[i] for i in self.target_layer_ids], dim=-1)
        context = self.hidden_norm(self.fc(context).float())
        positions = anchors[..., None] + torch.arange(size, device=anchors.device)  # [B, A, 16]
        masks = mask_embedding.expand(batch, count, size - 1, -1)
        stream = torch.cat((anchor_embeddings[:, :, None], masks), dim=2).flatten(1, 2)

        context_rope = self._cos_sin(torch.arange(length, device=anchors.device))
        query_rope = [t.flatten(1, 2)[:, None] for t in self._cos_sin(positions)]
        for layer in self.layers:
            visible = self._visible(positions, length, layer.window)
            attention = layer.self_attn
            x = layer.input_layernorm(stream)
            context_k, context_v = attention.keys_values(context, *context_rope)
            block_k, block_v = attention.keys_values(x, *query_rope)
            v = torch.cat((context_v, block_v), dim=2)
            k = torch.cat((context_k, block_k), dim=2).to(v.dtype)
            q = attention.queries(x, *query_rope).to(v.dtype)
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=visible)
            stream = stream + attention.o_proj(out.transpose(1, 2).flatten(-2))
            stream = stream + layer.mlp(layer.post_attention_layernorm(stream))
        return self.norm(stream).unflatten(1, (count, size))[:, :, 1:]

    @staticmethod
    def _visible(positions, length: int, window: int | None):
        """bool [B, 1, A·16, T + A·16]: what a query row sees of the context and of the blocks."""
        batch, count, size = positions.shape
        device = positions.device
        query = positions.flatten(1)  # [B, A·16]
        anchor = positions[:, :, :1].expand(-1, -1, size).flatten(1)
        key = torch.arange(length, device=device)
        sees_context = key < anchor[..., None]
        block = torch.arange(count, device=device).repeat_interleave(size)
        sees_block = (block[:, None] == block).expand(batch, -1, -1)
        if window is not None:
            sees_context = sees_context & (query[..., None] - key < window)
            behind = query[:, :, None] - query[:, None, :]
            sees_block = sees_block & (behind >= 0) & (behind < window)
        return torch.cat((sees_context, sees_block), dim=-1)[:, None]


def save(drafter: DFlashDrafter, settings: dict, folder: Path) -> None:
    """Writes config and the weights rounded to bfloat16."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(settings, indent=2) + "\n")
    weights = {k: v.detach().cpu().bfloat16().contiguous() for k, v in drafter.state_dict().items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def load(folder: Path, device: torch.device | str = "cpu") -> DFlashDrafter:
    settings = json.loads((folder / "config.json").read_text())
    drafter = DFlashDrafter(settings)
    weights = {k: v.float() for k, v in load_file(folder / "model.safetensors").items()}
    drafter.load_state_dict(weights, strict=True)
    return drafter.eval().to(device)
