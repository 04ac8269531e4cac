# SPDX-License-Identifier: Apache-2.0
"""The kernels one by one on the Qwen3.6-27B shape, against what they have to beat.

    python benchmarks/kernels.py --out FILE.json [--only gdn,commit,attention,tree]

Each figure is the median of replays of a CUDA graph that holds the launch several times. Kernels of
the same line run alternately in one process.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ddtree_vllm.attention import tree_attention, tree_suffix_attention
from ddtree_vllm.cache.compact import KVCacheTable, compact_accepted_kv
from ddtree_vllm.cache.linearise import linearise_rows
from ddtree_vllm.gdn import (
    Stash,
    StateTable,
    TreeRows,
    commit_paths,
    reference,
    tree_causal_conv,
    verify_tree,
)
from ddtree_vllm.sampling.walk import WalkOutput, walk_trees
from ddtree_vllm.tree import DraftTree, build_draft_trees, make_policy, top_k_log_probs

DEVICE = "cuda"
DTYPE = torch.bfloat16
KEY_HEADS, VALUE_HEADS, HEAD, WIDTH = 16, 48, 128, 4
CHANNELS = 2 * KEY_HEADS * HEAD + VALUE_HEADS * HEAD
STATE_BYTES = VALUE_HEADS * HEAD * HEAD * 4
GDN_LAYERS, ATTENTION_LAYERS = 48, 16
QUERY_HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE = 24, 4, 256, 784
HIDDEN, VOCAB, DEPTH, TOP_K, TAPS = 5120, 248320, 15, 8, 5


def microseconds(functions: dict[str, Callable[[], Any]], rounds: int = 30) -> dict[str, float]:
    """Median time of each, replayed in turn; one that cannot be captured is left out, by name."""
    graphs: dict[str, torch.cuda.CUDAGraph] = {}
    calls = 5
    for name, function in functions.items():
        try:
            function()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                for _ in range(calls):
                    function()
            graph.replay()
            torch.cuda.synchronize()
            graphs[name] = graph
        except Exception as error:
            print(f"{name}: {type(error).__name__}: {str(error)[:200]}", flush=True)
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(rounds):
        for name, graph in graphs.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times[name].append(1e3 * begin.elapsed_time(end) / calls)
    return {name: statistics.median(values) for name, values in times.items()}


def ints(values: Any) -> torch.Tensor:
    return torch.as_tensor(values, dtype=torch.int32, device=DEVICE)


def random_trees(requests: int, rows: int, seed: int = 0) -> DraftTree:
    """Best-first trees from random logits, as a drafter's."""
    tree = DraftTree.allocate(requests, rows - 1, DEVICE, max_depth=min(DEPTH, rows - 1))
    depth = min(DEPTH, rows - 1)
    generator = torch.Generator(DEVICE).manual_seed(seed)
    logits = 4 * torch.randn(requests, depth, 64, device=DEVICE, generator=generator)
    log_probs, tokens = logits.log_softmax(-1).topk(min(TOP_K, rows - 1))
    policy = make_policy(
        "ddtree", budget=rows - 1, depth=depth, candidates=log_probs.shape[-1], device=DEVICE
    )
    slots = ints(range(requests))
    build_draft_trees(tree, log_probs.float().contiguous(), tokens.contiguous(), slots, policy)
    return tree


class GatedDeltaNet:
    """Inputs of one layer's verification, and of the commit of `layers` layers."""

    def __init__(self, requests: int, rows: int, layers: int = 1) -> None:
        generator = torch.Generator(DEVICE).manual_seed(0)

        def noise(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator, device=DEVICE)

        self.requests, self.num_rows, self.layers = requests, rows, layers
        self.tree = random_trees(requests, rows)
        starts = ints([r * rows for r in range(requests)])
        self.rows = TreeRows(
            slots=ints(range(requests)),
            state_slots=ints(range(1, requests + 1)),
            row_start=starts,
            num_rows=ints([rows] * requests),
            stash_start=starts,
            max_num_rows=rows,
            null_slot=0,
        )
        total = requests * rows
        self.x = noise(total, CHANNELS).to(DTYPE)
        # Laid out as the layer keeps it, channels contiguous.
        self.weight = noise(WIDTH, CHANNELS).to(DTYPE).t()
        self.a, self.b = noise(total, VALUE_HEADS).to(DTYPE), noise(total, VALUE_HEADS).to(DTYPE)
        self.a_log, self.dt_bias = 0.3 * noise(VALUE_HEADS), 0.3 * noise(VALUE_HEADS)
        self.states = [0.3 * noise(requests + 1, VALUE_HEADS, HEAD, HEAD) for _ in range(layers)]
        self.windows = [noise(requests + 1, WIDTH - 1, CHANNELS).to(DTYPE) for _ in range(layers)]
        self.stash = Stash.allocate(
            layers,
            total,
            KEY_HEADS,
            VALUE_HEADS,
            HEAD,
            HEAD,
            DTYPE,
            DEVICE,
            max_reqs=requests,
            max_num_rows=rows,
        )
        self.qkv = torch.empty(total, CHANNELS, dtype=DTYPE, device=DEVICE)
        self.out = torch.empty(total, VALUE_HEADS, HEAD, dtype=DTYPE, device=DEVICE)
        self.table = StateTable.build(list(zip(self.windows, self.states, strict=True)))
        self.path = torch.full((requests, 16), -1, dtype=torch.int32, device=DEVICE)
        length = min(5, rows)
        self.path[:, :length] = ints(range(length))
        self.path_len = ints([length] * requests)
        self.conv()

    def conv(self) -> None:
        tree_causal_conv(
            self.x,
            self.weight,
            None,
            self.windows[0],
            self.rows,
            self.tree,
            self.qkv,
            self.stash,
            0,
        )

    def verify(self, precision: str | None = None) -> None:
        verify_tree(
            self.qkv,
            self.a,
            self.b,
            self.a_log,
            self.dt_bias,
            self.states[0],
            self.rows,
            self.tree,
            self.out,
            self.stash,
            0,
            precision,
        )

    def commit(self) -> None:
        commit_paths(
            self.table,
            self.stash,
            self.path,
            self.path_len,
            self.rows.stash_start,
            self.rows.state_slots,
            16,
            WIDTH,
            null_slot=0,
        )

    def error(self) -> float:
        """Of u against float64, request 0, relative to the mean norm of its rows."""
        n = self.num_rows
        on_cpu = [t.cpu() for t in (self.qkv[:n], self.a[:n], self.b[:n], self.a_log, self.dt_bias)]
        x = reference.project(on_cpu[0], on_cpu[1], on_cpu[2], on_cpu[3], on_cpu[4], HEAD, HEAD)
        words = self.tree.ancestors[0, :n].cpu().long()
        columns = torch.arange(n)
        mask = (words[:, columns // 32] >> (columns % 32)) & 1 > 0
        _, u, _ = reference.run_tree_closed_form(x, mask, self.states[0][1].cpu().double())
        norm = self.stash.k[0, :n].double().cpu().norm(dim=-1)
        norm = norm.repeat_interleave(VALUE_HEADS // KEY_HEADS, 1)[..., None]
        difference = self.stash.u[0, :n].double().cpu() * norm - u
        return float(difference.flatten(1).norm(dim=1).max() / u.flatten(1).norm(dim=1).mean())


def per_row(case: GatedDeltaNet) -> Callable[[], Any]:
    """vLLM's Triton kernel for drafts of a chain: one row after another, a state written for each."""
    from vllm.third_party.flash_linear_attention.ops import fused_sigmoid_gating_delta_rule_update

    total = case.requests * case.num_rows
    q, k, v = case.qkv.split([KEY_HEADS * HEAD, KEY_HEADS * HEAD, VALUE_HEADS * HEAD], dim=-1)
    states = torch.zeros(total + 1, VALUE_HEADS, HEAD, HEAD, device=DEVICE)
    indices = (1 + torch.arange(total, device=DEVICE)).int().view(case.requests, case.num_rows)
    starts = ints([r * case.num_rows for r in range(case.requests + 1)])
    accepted = ints([1] * case.requests)

    def call() -> None:
        fused_sigmoid_gating_delta_rule_update(
            A_log=case.a_log,
            a=case.a,
            b=case.b,
            dt_bias=case.dt_bias,
            q=q.reshape(1, total, KEY_HEADS, HEAD),
            k=k.reshape(1, total, KEY_HEADS, HEAD),
            v=v.reshape(1, total, VALUE_HEADS, HEAD),
            initial_state=states,
            inplace_final_state=True,
            cu_seqlens=starts,
            ssm_state_indices=indices,
            num_accepted_tokens=accepted,
            use_qk_l2norm_in_kernel=True,
        )

    return call


def time_gdn(results: dict[str, Any]) -> None:
    for requests, rows in (
        (1, 16),
        (1, 64),
        (1, 128),
        (4, 16),
        (4, 64),
        (16, 16),
        (16, 32),
        (32, 16),
    ):
        case = GatedDeltaNet(requests, rows)
        times = microseconds(
            {"verify": case.verify, "conv": case.conv, "vllm_per_row": per_row(case)}
        )
        # The state once, the rows in and out, the stash.
        row_bytes = 2 * (CHANNELS + VALUE_HEADS * HEAD + KEY_HEADS * HEAD) + 4 * VALUE_HEADS * HEAD
        floor = (requests * STATE_BYTES + requests * rows * row_bytes) / 4.3e6
        times |= {"error": case.error(), "memory_floor": floor}
        report(results, "gdn", f"b{requests}_rows{rows}", times)


def time_commit(results: dict[str, Any]) -> None:
    for requests in (1, 4, 16):
        time_one_commit(results, requests)
        torch.cuda.empty_cache()


def time_one_commit(results: dict[str, Any], requests: int) -> None:
    case = GatedDeltaNet(requests, 16, GDN_LAYERS)
    case.verify()
    state_bytes = 2 * GDN_LAYERS * requests * STATE_BYTES
    source = torch.empty(state_bytes // 8, device=DEVICE)
    target = torch.empty_like(source)
    times = microseconds({"commit": case.commit, "copy": lambda: target.copy_(source)}, 15)
    times["over_copy"] = times["commit"] / times["copy"]
    report(results, "commit", f"b{requests}", times)


class Attention:
    """A step's rows of one attention layer over caches in vLLM's layout."""

    def __init__(self, requests: int, rows: int, context: int) -> None:
        self.requests, self.num_rows, self.length = requests, rows, context + rows
        blocks = -(-self.length // BLOCK_SIZE)
        cache = torch.randn(
            requests * blocks + 1, KV_HEADS, BLOCK_SIZE, 2 * HEAD_DIM, device=DEVICE, dtype=DTYPE
        )
        self.key, self.value = cache.transpose(1, 2).split(HEAD_DIM, dim=-1)
        self.table = (torch.randperm(requests * blocks, device=DEVICE) + 1).int()
        self.table = self.table.view(requests, blocks)
        total = requests * rows
        self.q = torch.randn(total, QUERY_HEADS, HEAD_DIM, device=DEVICE, dtype=DTYPE)
        self.out = torch.empty_like(self.q)
        self.starts = ints([r * rows for r in range(requests + 1)])
        self.lengths = ints([self.length] * requests)
        self.prefixes = ints([context] * requests)
        self.tree = random_trees(requests, rows)
        self.common = {
            "block_table": self.table,
            "seq_lens": self.lengths,
            "query_start_loc": self.starts,
            "max_query_len": rows,
            "scale": HEAD_DIM**-0.5,
            "ancestors": self.tree.ancestors,
            "slots": ints(range(requests)),
        }

    def flash(self, causal: bool) -> Any:
        from vllm.vllm_flash_attn import flash_attn_varlen_func

        return flash_attn_varlen_func(
            q=self.q,
            k=self.key,
            v=self.value,
            out=self.out,
            cu_seqlens_q=self.starts,
            max_seqlen_q=self.num_rows,
            seqused_k=self.lengths if causal else self.prefixes,
            max_seqlen_k=self.length,
            softmax_scale=HEAD_DIM**-0.5,
            causal=causal,
            block_table=self.table,
            return_softmax_lse=not causal,
            fa_version=3,
        )

    def prefix_and_suffix(self) -> torch.Tensor:
        """What the engine runs on a step of trees alone."""
        out, lse = self.flash(causal=False)
        return tree_suffix_attention(
            self.q, self.key, self.value, out, prefix_out=out, prefix_lse=lse, **self.common
        )

    def whole(self) -> torch.Tensor:
        """What the engine runs on a step of trees and prompts."""
        return tree_attention(
            self.q, self.key, self.value, self.out, max_seq_len=self.length, **self.common
        )

    def flex(self) -> Callable[[], Any]:
        """FlexAttention with the tree as its mask, on keys that lie together."""
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        words, rows, prefix = self.tree.ancestors, self.num_rows, self.length - self.num_rows
        shape = (self.requests, KV_HEADS, self.length, HEAD_DIM)
        key = torch.randn(shape, device=DEVICE, dtype=DTYPE)
        value = torch.randn(shape, device=DEVICE, dtype=DTYPE)
        q = self.q.view(self.requests, rows, QUERY_HEADS, HEAD_DIM).transpose(1, 2).contiguous()

        def visible(b: Any, _h: Any, row: Any, column: Any) -> Any:
            local = (column - prefix).clamp(min=0)
            return (column < prefix) | ((words[b, row, local // 32] >> (local % 32)) & 1 > 0)

        mask = create_block_mask(visible, self.requests, None, rows, self.length, device=DEVICE)
        compiled = torch.compile(flex_attention)
        return lambda: compiled(q, key, value, block_mask=mask, enable_gqa=True)


def time_attention(results: dict[str, Any]) -> None:
    for requests, rows, context in (
        (1, 64, 1024),
        (4, 64, 1024),
        (16, 16, 1024),
        (1, 64, 32768),
        (4, 64, 32768),
    ):
        case = Attention(requests, rows, context)
        functions: dict[str, Callable[[], Any]] = {
            "prefix_and_suffix": case.prefix_and_suffix,
            "whole": case.whole,
            "fa3_causal": lambda case=case: case.flash(causal=True),
        }
        if (requests, context) == (4, 32768):
            functions["flex_attention"] = case.flex()
        times = microseconds(functions)
        times["memory_floor"] = 2 * requests * context * KV_HEADS * HEAD_DIM * 2 / 4.3e6
        whole = case.whole().float().clone()
        times["difference"] = (case.prefix_and_suffix().float() - whole).abs().max().item()
        report(results, "attention", f"b{requests}_rows{rows}_context{context}", times)
        del case, functions
        torch.cuda.empty_cache()


def time_tree(results: dict[str, Any]) -> None:
    """Build, walk, compaction and linearisation: all that a tree adds but the commit."""
    for requests, rows in ((1, 64), (4, 64), (16, 32), (32, 16)):
        time_one_tree(results, requests, rows)


def time_one_tree(results: dict[str, Any], requests: int, rows: int) -> None:
    tree = random_trees(requests, rows)
    total, budget = requests * rows, rows - 1
    depth = min(DEPTH, budget)
    logits = torch.randn(requests * depth, VOCAB, device=DEVICE).to(DTYPE)
    log_probs, tokens = top_k_log_probs(logits, TOP_K)
    shape = (requests, depth, TOP_K)
    policy = make_policy("ddtree", budget=budget, depth=depth, candidates=TOP_K, device=DEVICE)
    other = random_trees(requests, rows, seed=1)
    slots = ints(range(requests))
    starts = ints([r * rows for r in range(requests + 1)])
    # The target agrees with the first nodes of every path down from the root.
    sampled = torch.full((requests, rows), -1, dtype=torch.int64, device=DEVICE)
    parents, nodes = tree.parents.tolist(), tree.tokens.tolist()
    for r in range(requests):
        for row in range(min(rows - 1, int(tree.num_nodes[r])), 0, -1):
            sampled[r, parents[r][row]] = nodes[r][row - 1]
    output = WalkOutput(
        torch.empty(requests, rows, dtype=torch.int32, device=DEVICE),
        torch.empty(requests, dtype=torch.int32, device=DEVICE),
        torch.empty(requests, rows, dtype=torch.int64, device=DEVICE),
        torch.empty(requests, dtype=torch.int32, device=DEVICE),
    )
    blocks = 2 * requests + 1
    caches = [
        torch.randn(blocks, KV_HEADS, BLOCK_SIZE, 2 * HEAD_DIM, device=DEVICE, dtype=DTYPE)
        for _ in range(ATTENTION_LAYERS)
    ]
    table = KVCacheTable.build([c.transpose(1, 2).split(HEAD_DIM, dim=-1) for c in caches])
    mapping = torch.arange(total, device=DEVICE) // rows * 2 * BLOCK_SIZE + BLOCK_SIZE
    mapping += torch.arange(total, device=DEVICE) % rows
    hidden = [torch.randn(total, HIDDEN, device=DEVICE).to(DTYPE) for _ in range(TAPS)]
    case = {
        "top_k": lambda: top_k_log_probs(logits, TOP_K),
        "build": lambda: build_draft_trees(
            other, log_probs.view(shape), tokens.view(shape), slots, policy
        ),
        "walk": lambda: walk_trees(tree, slots, starts, sampled.view(-1), output),
        "compact": lambda: compact_accepted_kv(
            table, output.path, output.path_len, starts, mapping
        ),
        "linearise": lambda: linearise_rows(hidden, output.path, output.path_len, starts),
    }
    times = microseconds(case)
    times["path_rows"] = output.path_len.float().mean().item()
    parts = ("build", "walk", "compact", "linearise")
    times["overhead_ms"] = sum(times[part] for part in parts) / 1e3
    report(results, "tree", f"b{requests}_n{budget}", times)


def report(results: dict[str, Any], section: str, name: str, times: dict[str, float]) -> None:
    results.setdefault(section, {})[name] = times
    print(section, name, *(f"{key} {value:.4g}" for key, value in times.items()), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="gdn,commit,attention,tree")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    sections = {
        "gdn": time_gdn,
        "commit": time_commit,
        "attention": time_attention,
        "tree": time_tree,
    }
    results: dict[str, Any] = {}
    for name in args.only.split(","):
        try:
            sections[name](results)
        except Exception as error:  # a section that fails must not cost the others
            print(f"{name} failed: {type(error).__name__}: {error}", flush=True)
        args.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
