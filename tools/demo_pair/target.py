# SPDX-License-Identifier: Apache-2.0
"""The target: a Qwen3.5-type hybrid (Gated DeltaNet and full attention, 3:1) of 7.5 M parameters.

Hugging Face's class holds the weights. Its PyTorch fallback for Gated DeltaNet is slow to train, so
the two forward passes here are our own: `forward` over whole sequences (chunked, after Yang et al.,
"Gated Delta Networks", section 3.3) and `Decoder` token by token (the recurrence itself).
"""

import json
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

MAX_LENGTH = 4096
NUM_LAYERS = 4


def config(*, vocab_size: int, end_of_text: int, turn_end: int, hidden_size: int = 320) -> dict:
    """The checkpoint's config.json; head sizes, gates and rotary scheme are Qwen3.6-27B's."""
    return {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": 768,
        "num_hidden_layers": NUM_LAYERS,
        "layer_types": ["linear_attention"] * 3 + ["full_attention"],
        "full_attention_interval": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "attn_output_gate": True,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "mamba_ssm_dtype": "float32",
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10_000_000,
            "partial_rotary_factor": 0.25,
            "mrope_interleaved": True,
            "mrope_section": [11, 11, 10],
        },
        "max_position_embeddings": MAX_LENGTH,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "initializer_range": 0.02,
        "bos_token_id": None,
        "eos_token_id": turn_end,
        "pad_token_id": end_of_text,
        "dtype": "bfloat16",
    }


def build(settings: dict, *, seed: int) -> Qwen3_5ForCausalLM:
    """A fresh float32 model; decay rates start spread over time scales of 1 to 1,000 tokens."""
    torch.manual_seed(seed)
    model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**settings)).float()
    with torch.no_grad():
        for layer in model.model.layers:
            if layer.block_type != "linear_attention":
                continue
            mixer = layer.linear_attn
            mixer.A_log.uniform_(1.0, 8.0).log_()
            time_step = torch.exp(torch.empty_like(mixer.dt_bias).uniform_(-6.9, -2.3))
            mixer.dt_bias.copy_(time_step + torch.log(-torch.expm1(-time_step)))
    return model


def save(model: Qwen3_5ForCausalLM, settings: dict, folder: Path) -> None:
    """Writes config, generation config and the weights rounded to bfloat16."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(settings, indent=2) + "\n")
    ends = [settings["eos_token_id"], settings["pad_token_id"]]
    generation = {"eos_token_id": ends, "pad_token_id": settings["pad_token_id"]}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    weights = {k: v.detach().cpu().bfloat16().contiguous() for k, v in model.state_dict().items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def load(folder: Path, device: torch.device | str = "cpu") -> Qwen3_5ForCausalLM:
    """The saved weights in float32: what a server gives with `--dtype float32`."""
    settings = json.loads((folder / "config.json").read_text())
    model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**settings))
    weights = {k: v.float() for k, v in load_file(folder / "model.safetensors").items()}
    model.load_state_dict(weights, strict=True)
    return model.float().eval().to(device)


def round_to_bfloat16(model: torch.nn.Module) -> None:
    """Rounds the weights in place to what `save` stores."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16().float())


def _zero_centred_norm(x, norm):
    return F.rms_norm(x, x.shape[-1:], 1.0 + norm.weight, norm.eps)


def _unit(x):
    """x / sqrt(sum x² + 1e-6) over the last dimension."""
    size = x.shape[-1]
    return F.rms_norm(x, (size,), eps=1e-6 / size) * size**-0.5


def rotate(x, cos, sin):
    """Rotary embedding in split halves on the first 2·cos.shape[-1] features of x [..., D]."""
    half = cos.shape[-1]
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), dim=-1).to(x.dtype)


def _cos_sin(model, positions):
    angles = positions[..., None].float() * model.model.rotary_emb.inv_freq.float()
    return angles.cos(), angles.sin()


def chunked_gated_delta(q, k, v, g, beta, *, chunk: int = 64):
    """Gated delta rule over whole sequences.

    Args:
        q, k: [B, T, H, K] float32, unit keys, queries scaled.
        v: [B, T, H, V] float32.
        g, beta: [B, T, H] float32, log-decay (<= 0) and write strength.

    Returns:
        [B, T, H, V] outputs from a zero state.
    """
    length = q.shape[1]
    padding = -length % chunk
    q, k, v, g, beta = (
        F.pad(x.transpose(1, 2), (0, 0) * (x.dim() - 3) + (0, padding)).unflatten(2, (-1, chunk))
        for x in (q, k, v, g, beta)
    )
    G = g.cumsum(-1)
    lower = torch.ones(chunk, chunk, dtype=torch.bool, device=q.device).tril()
    decay = (G[..., :, None] - G[..., None, :]).masked_fill(~lower, float("-inf")).exp()
    A = (beta[..., None] * decay * (k @ k.mT)).tril(-1)
    rhs = torch.cat((beta[..., None] * v, (beta * G.exp())[..., None] * k), dim=-1)
    solved = torch.linalg.solve_triangular(A, rhs, upper=False, unitriangular=True)
    U, W = solved.split((v.shape[-1], k.shape[-1]), dim=-1)
    scores = decay * (q @ k.mT)
    q_in = G.exp()[..., None] * q
    k_out = (G[..., -1:] - G).exp()[..., None] * k
    kept = G[..., -1].exp()[..., None, None]

    state = q.new_zeros(*q.shape[:2], k.shape[-1], v.shape[-1])
    outputs = []
    for c in range(q.shape[2]):
        u = U[:, :, c] - W[:, :, c] @ state
        outputs.append(q_in[:, :, c] @ state + scores[:, :, c] @ u)
        state = kept[:, :, c] * state + k_out[:, :, c].mT @ u
    return torch.cat(outputs, dim=2)[:, :, :length].transpose(1, 2)


def _gdn_inputs(mixer, mixed, b, a):
    """Splits the convolved projection [..., C] into what the delta rule takes, in float32."""
    group = mixer.num_v_heads // mixer.num_k_heads
    q, k, v = F.silu(mixed).float().split((mixer.key_dim, mixer.key_dim, mixer.value_dim), dim=-1)
    q = _unit(q.unflatten(-1, (-1, mixer.head_k_dim))) * mixer.head_k_dim**-0.5
    k = _unit(k.unflatten(-1, (-1, mixer.head_k_dim)))
    q, k = (x.repeat_interleave(group, dim=-2) for x in (q, k))
    v = v.unflatten(-1, (-1, mixer.head_v_dim))
    g = -mixer.A_log.float().exp() * F.softplus(a.float() + mixer.dt_bias.float())
    return q, k, v, g, b.float().sigmoid()


def _gdn_output(mixer, core, z):
    z = z.unflatten(-1, (-1, mixer.head_v_dim)).float()
    normed = F.rms_norm(core, core.shape[-1:], mixer.norm.weight, mixer.norm.variance_epsilon)
    return mixer.out_proj((normed * F.silu(z)).flatten(-2))


def _gdn(mixer, x):
    raw = mixer.in_proj_qkv(x)
    taps = mixer.conv1d.weight.squeeze(1).to(raw.dtype)
    width = taps.shape[-1]
    window = F.pad(raw, (0, 0, width - 1, 0))
    mixed = sum(taps[:, j] * window[:, j : j + x.shape[1]] for j in range(width))
    with torch.autocast(x.device.type, enabled=False):
        inputs = _gdn_inputs(mixer, mixed, mixer.in_proj_b(x), mixer.in_proj_a(x))
        core = chunked_gated_delta(*inputs)
    return _gdn_output(mixer, core, mixer.in_proj_z(x))


def _attention_inputs(attention, x, cos, sin):
    """q, k, v as [B, heads, T, D] and the output gate [B, T, heads·D]."""
    q, gate = attention.q_proj(x).unflatten(-1, (-1, 2 * attention.head_dim)).chunk(2, dim=-1)
    k, v = (
        p(x).unflatten(-1, (-1, attention.head_dim)) for p in (attention.k_proj, attention.v_proj)
    )
    q = rotate(_zero_centred_norm(q.float(), attention.q_norm).transpose(1, 2), cos, sin)
    k = rotate(_zero_centred_norm(k.float(), attention.k_norm).transpose(1, 2), cos, sin)
    return q.to(v.dtype), k.to(v.dtype), v.transpose(1, 2), gate.flatten(-2)


def forward(model, tokens, *, dropout: float = 0.0):
    """Runs whole sequences.

    Args:
        tokens: int64 [B, T].
        dropout: on what each mixer and MLP adds to the residual stream; for training.

    Returns:
        The normed last hidden state [B, T, H] (feed it to `model.lm_head`), and the residual stream
        after each layer, a list of [B, T, H]. Entry i is what a DFlash drafter whose
        `target_layer_ids` holds i is given.
    """
    cos, sin = _cos_sin(model, torch.arange(tokens.shape[1], device=tokens.device))
    stream = model.model.embed_tokens(tokens)
    streams = []
    for layer in model.model.layers:
        x = _zero_centred_norm(stream, layer.input_layernorm)
        if layer.block_type == "linear_attention":
            mixed = _gdn(layer.linear_attn, x)
        else:
            attention = layer.self_attn
            q, k, v, gate = _attention_inputs(attention, x, cos, sin)
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            mixed = attention.o_proj(out.transpose(1, 2).flatten(-2) * gate.sigmoid())
        stream = stream + F.dropout(mixed, dropout, dropout > 0)
        mlp = layer.mlp(_zero_centred_norm(stream, layer.post_attention_layernorm))
        stream = stream + F.dropout(mlp, dropout, dropout > 0)
        streams.append(stream)
    return _zero_centred_norm(stream, model.model.norm), streams


class Decoder:
    """Token-by-token decoding of a batch whose sequences stand at the same position."""

    def __init__(self, model, batch: int, max_length: int):
        self.model = model
        self.position = 0
        device = model.lm_head.weight.device
        self._state = []
        for layer in model.model.layers:
            shapes: tuple[tuple[int, ...], ...]
            if layer.block_type == "linear_attention":
                m = layer.linear_attn
                shapes = (
                    (batch, m.conv_kernel_size - 1, m.conv_dim),
                    (batch * m.num_v_heads, m.head_v_dim, m.head_k_dim),
                )
            else:
                a = layer.self_attn
                heads = a.config.num_key_value_heads
                shapes = ((batch, heads, max_length, a.head_dim),) * 2
            self._state.append([torch.zeros(s, device=device) for s in shapes])

    @torch.no_grad()
    def step(self, tokens):
        """Takes the token at `position` of each sequence, int64 [B]; returns logits [B, V]."""
        model = self.model
        cos, sin = _cos_sin(model, torch.tensor([self.position], device=tokens.device))
        stream = model.model.embed_tokens(tokens)
        for layer, state in zip(model.model.layers, self._state, strict=True):
            x = _zero_centred_norm(stream, layer.input_layernorm)
            if layer.block_type == "linear_attention":
                stream = stream + self._gdn(layer.linear_attn, x, state)
            else:
                stream = stream + self._attend(layer.self_attn, x, state, cos, sin)
            stream = stream + layer.mlp(_zero_centred_norm(stream, layer.post_attention_layernorm))
        self.position += 1
        return model.lm_head(_zero_centred_norm(stream, model.model.norm))

    def _gdn(self, mixer, x, state):
        window, S = state
        raw = torch.cat((window, mixer.in_proj_qkv(x)[:, None]), dim=1)
        window.copy_(raw[:, 1:])
        mixed = (raw * mixer.conv1d.weight.squeeze(1).T).sum(1)
        q, k, v, g, beta = _gdn_inputs(mixer, mixed, mixer.in_proj_b(x), mixer.in_proj_a(x))
        q, k, v = (t.flatten(0, 1) for t in (q, k, v))
        S.mul_(g.exp().flatten()[:, None, None])
        u = beta.flatten()[:, None] * (v - (S @ k[..., None])[..., 0])
        S.baddbmm_(u[..., None], k[:, None])
        core = (S @ q[..., None])[..., 0].unflatten(0, (-1, mixer.num_v_heads))
        return _gdn_output(mixer, core, mixer.in_proj_z(x))

    def _attend(self, attention, x, state, cos, sin):
        q, k, v, gate = _attention_inputs(attention, x[:, None], cos, sin)
        # The query heads that share a key head become its query rows: keys are read once.
        q = q.unflatten(1, (k.shape[1], -1)).squeeze(3)
        for cache, new in zip(state, (k, v), strict=True):
            cache[:, :, self.position : self.position + 1] = new
        keys, values = (cache[:, :, : self.position + 1] for cache in state)
        out = F.scaled_dot_product_attention(q, keys, values).flatten(1)
        return attention.o_proj(out * gate[:, 0].sigmoid())


@torch.no_grad()
def generate(model, prompts: list[list[int]], length: int, temperature, *, seed: int = 0):
    """Continues each prompt to `length` tokens in all, through end tokens.

    Args:
        temperature: float [B]; 0 is greedy.

    Returns:
        int64 [B, length], prompts included.
    """
    device = model.lm_head.weight.device
    generator = torch.Generator(device=device).manual_seed(seed)
    rows = len(prompts)
    given = torch.zeros(rows, length, dtype=torch.long)
    for row, prompt in zip(given, prompts, strict=True):
        row[: len(prompt)] = torch.tensor(prompt[:length])
    given = given.to(device)
    prompt_length = torch.tensor([len(p) for p in prompts], device=device)
    temperature = torch.as_tensor(temperature, device=device).expand(rows)
    scale = temperature.clamp(min=1e-6)[:, None]
    decoder = Decoder(model, rows, length)
    for position in range(length - 1):
        logits = decoder.step(given[:, position])
        noise = torch.empty_like(logits).exponential_(generator=generator).log()
        sampled = (logits / scale - noise).argmax(-1)
        chosen = torch.where(temperature > 0, sampled, logits.argmax(-1))
        follows = position + 1 >= prompt_length
        given[:, position + 1] = torch.where(follows, chosen, given[:, position + 1])
    return given
