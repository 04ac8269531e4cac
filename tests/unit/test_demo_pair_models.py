# SPDX-License-Identifier: Apache-2.0
"""The forward passes that train the demo pair, against Hugging Face's model and a plain rewrite."""

import itertools
import math
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

from demo_pair import acceptance, drafter, target

SETTINGS = target.config(vocab_size=128, end_of_text=124, turn_end=126, hidden_size=64)


@pytest.fixture(scope="module")
def model():
    model = target.build(SETTINGS, seed=3)
    for name, p in model.named_parameters():
        if p.dim() == 2:
            torch.nn.init.normal_(p, std=0.1)
        elif "norm" in name:
            torch.nn.init.normal_(p, mean=0.2, std=0.1)
    return model.eval()


@pytest.fixture(scope="module")
def draft_model():
    torch.manual_seed(5)
    settings = drafter.config(SETTINGS, mask=127) | {"sliding_window": 8}
    made = drafter.DFlashDrafter(settings).eval()
    for p in made.parameters():
        torch.nn.init.normal_(p, mean=1.0 if p.dim() == 1 else 0.0, std=0.1)
    return made


@pytest.fixture(scope="module")
def tokens():
    return torch.randint(0, 120, (2, 147), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def test_training_forward_equals_hugging_face(model, tokens):
    reference = model.model(tokens, output_hidden_states=True)
    hidden, streams = target.forward(model, tokens)
    torch.testing.assert_close(hidden, reference.last_hidden_state, atol=2e-4, rtol=2e-4)
    # Entry i of the streams is the residual after layer i: the state DFlash's layer id i names.
    for ours, theirs in zip(streams[:-1], reference.hidden_states[1:-1], strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-4, rtol=2e-4)


@torch.no_grad()
def test_decoding_token_by_token_equals_the_whole_sequence(model, tokens):
    hidden, _ = target.forward(model, tokens)
    decoder = target.Decoder(model, batch=2, max_length=tokens.shape[1])
    logits = torch.stack([decoder.step(t) for t in tokens.T], dim=1)
    torch.testing.assert_close(logits, model.lm_head(hidden), atol=5e-4, rtol=5e-4)


@torch.no_grad()
def test_saved_target_loads_in_hugging_face_with_rounded_weights(model, tokens, tmp_path):
    target.save(model, SETTINGS, tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    ours = target.load(tmp_path)
    assert theirs.config.architectures == ["Qwen3_5ForCausalLM"]
    assert torch.equal(ours.lm_head.weight, model.lm_head.weight.bfloat16().float())
    torch.testing.assert_close(
        ours.lm_head(target.forward(ours, tokens)[0]), theirs(tokens).logits, atol=5e-4, rtol=5e-4
    )


def test_greedy_rows_do_not_depend_on_sampled_rows_beside_them(model):
    prompts = [[5, 6, 7], [9, 8, 7, 6, 5]]
    both = target.generate(model, prompts, 24, torch.tensor([0.0, 1.0]), seed=4)
    alone = target.generate(model, prompts[:1], 24, torch.tensor([0.0]), seed=9)
    assert both[0].tolist() == alone[0].tolist()
    assert both[1, :5].tolist() == prompts[1]


@torch.no_grad()
def test_drafting_many_blocks_at_once_equals_one_at_a_time(draft_model):
    generator = torch.Generator().manual_seed(2)
    streams = [torch.randn(1, 40, 64, generator=generator) for _ in range(4)]
    embeddings = torch.randn(1, 3, 64, generator=generator)
    mask = torch.randn(64, generator=generator)
    anchors = torch.tensor([[4, 17, 38]])
    together = draft_model(streams, anchors, embeddings, mask)
    for i, p in enumerate(anchors[0].tolist()):
        # Context at and after the anchor must not matter: here it is not even there.
        alone = draft_model(
            [s[:, :p] for s in streams], anchors[:, i : i + 1], embeddings[:, i : i + 1], mask
        )
        torch.testing.assert_close(together[:, i], alone[:, 0], atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_drafter_equals_a_row_by_row_rewrite(draft_model):
    generator = torch.Generator().manual_seed(6)
    streams = [torch.randn(1, 30, 64, generator=generator) for _ in range(4)]
    embedding, mask = torch.randn(2, 64, generator=generator)
    p = 21
    ours = draft_model(streams, torch.tensor([[p]]), embedding[None, None], mask)[0, 0]
    reference = _draft_row_by_row(
        draft_model.double(),
        [s[0, :p].double() for s in streams],
        embedding.double(),
        mask.double(),
        p,
    )
    draft_model.float()
    torch.testing.assert_close(ours, reference.float(), atol=1e-4, rtol=1e-4)


def _draft_row_by_row(model, streams, embedding, mask, p):
    def norm(x, module):
        return x / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * module.weight

    def turned(x, position):  # x [4, 128]
        angles = position * 1e6 ** -(torch.arange(64, dtype=torch.float64) / 64)
        a, b = x[:, :64], x[:, 64:]
        return torch.cat(
            (a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), 1
        )

    context = norm(
        torch.cat([streams[i] for i in (1, 2, 3)], -1) @ model.fc.weight.T, model.hidden_norm
    )
    rows = [embedding] + [mask] * 15
    for layer, (window, causal) in zip(model.layers, ((8, True), (None, False)), strict=True):
        a = layer.self_attn

        def keys_values(x, position, a=a):
            k = norm((a.k_proj.weight @ x).view(4, 128), a.k_norm)
            return turned(k, position), (a.v_proj.weight @ x).view(4, 128)

        normed = [norm(r, layer.input_layernorm) for r in rows]
        seen = [(j, *keys_values(context[j], j)) for j in range(p)]
        seen += [(p + j, *keys_values(x, p + j)) for j, x in enumerate(normed)]
        after = []
        for i, (row, x) in enumerate(zip(rows, normed, strict=True)):
            q = turned(norm((a.q_proj.weight @ x).view(4, 128), a.q_norm), p + i)
            visible = [
                (k, v)
                for j, k, v in seen
                if (not causal or j <= p + i) and (window is None or p + i - j < window)
            ]
            k, v = (torch.stack(t, dim=1) for t in zip(*visible, strict=True))  # [4, keys, 128]
            scores = torch.einsum("hd,hkd->hk", q, k) / math.sqrt(128)
            read = torch.einsum("hk,hkd->hd", scores.softmax(-1), v).flatten()
            mixed = row + a.o_proj.weight @ read
            y = norm(mixed, layer.post_attention_layernorm)
            gate = torch.nn.functional.silu(layer.mlp.gate_proj.weight @ y)
            up = layer.mlp.up_proj.weight @ y
            after.append(mixed + layer.mlp.down_proj.weight @ (gate * up))
        rows = after
    return torch.stack([norm(r, model.norm) for r in rows[1:]])


def test_drafter_config_is_read_as_written(tmp_path, draft_model):
    drafter.save(draft_model, drafter.config(SETTINGS, mask=127), tmp_path)
    read = AutoConfig.from_pretrained(tmp_path)
    assert read.architectures == ["DFlashDraftModel"]
    assert read.sliding_window == 128
    assert read.layer_types == ["sliding_attention", "full_attention"]
    assert read.rope_parameters["rope_theta"] == 1_000_000
    assert read.dflash_config == {"mask_token_id": 127, "target_layer_ids": [1, 2, 3]}
    reloaded = drafter.load(tmp_path)
    assert torch.equal(reloaded.fc.weight, draft_model.fc.weight.bfloat16().float())


def test_best_first_tree_is_the_most_probable_prefixes():
    generator = torch.Generator().manual_seed(8)
    scores = torch.rand(3, 4, generator=generator).log().sort(-1, descending=True).values.tolist()
    everything = [ranks for d in (1, 2, 3) for ranks in itertools.product(range(4), repeat=d)]
    everything.sort(key=lambda r: (-sum(scores[i][rank] for i, rank in enumerate(r)), r))
    order = acceptance.best_first(scores, 40)
    assert sorted(order, key=order.get) == everything[:40]


def test_measured_tokens_per_step_of_an_oracle_and_of_a_useless_drafter(model):
    class Oracle:
        """Drafts hidden states for which `lm_head` scores the tokens of `truth` highest."""

        mask_token_id = 127

        def __init__(self, truth):
            self.truth = truth

        def __call__(self, streams, anchors, embeddings, mask):
            at = (anchors[0, :, None] + 1 + torch.arange(15)).clamp(max=len(self.truth) - 1)
            head = model.lm_head.weight
            return 100 * (head / head.norm(dim=1, keepdim=True) ** 2)[self.truth[at]][None]

    prompt, new = [3, 1, 4, 1, 5], 65
    output = target.generate(model, [prompt], len(prompt) + new, torch.tensor([0.0]))[0]
    arguments = {
        "temperature": 0.0, "new_tokens": new, "budgets": (1, 15, 31), "end_tokens": set()
    }  # fmt: skip
    oracle = acceptance.measure(model, Oracle(output), [prompt], **arguments)
    assert oracle["chain"] == 16
    assert oracle["ddtree"]["1"] == 2
    assert oracle["ddtree"]["31"] >= 15
    wrong = acceptance.measure(model, Oracle((output + 1) % 120), [prompt], **arguments)
    assert wrong["chain"] < 2
