# SPDX-License-Identifier: Apache-2.0
"""Puts a run's files together: one JSON with provenance and ratios, and the plots.

    python benchmarks/report.py --steps ROUND1.json ROUND2.json --kernels FILE.json \
        --acceptance FILE.json --provenance FILE.json --name 2026-11-29-h200

Contestants that took turns are a round; ratios are made within one. Tokens per second are the demo
pair's acceptance at the same budget (mixed prompts, greedy), for chains and trees alike, over the
step. --acceptance alone makes NAME-acceptance.json, .md and .png, and so does it beside the others.
Needs matplotlib (constraints/bench.txt). Missing figures stay out of `ratios`; nothing is guessed.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

GIB = 1 << 30
# vLLM's chain plays in every round.
REFERENCE = "vllm-chain15"
# What turns a step's time into tokens per second.
ACCEPTANCE_CELL = "mixed:0"
MEMORY_UTILISATION = 0.92
# Kernels of a step by what they do; the first pattern that a name holds decides.
CATEGORIES = (
    ("matrix products", ("nvjet", "gemm", "splitKreduce", "cutlass_80", "ll_bf16")),
    ("attention", ("flash", "tree_attention", "merge_splits", "reshape_and_cache")),
    ("Gated DeltaNet", ("_verify_", "fused_sigmoid_gating", "fused_gdn", "gated_delta", "conv", "_commit")),
    ("sampling, drafting, trees", ("gumbel", "candidates", "best_first", "walk", "linearise",
                                   "compact", "top_k", "argmax", "sampl", "reject", "_plan")),
    ("norms, gates, copies", ("",)),
)  # fmt: skip


def merged(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """All contestants; one that has played before has the number of its round in its name."""
    steps: dict[str, Any] = {}
    for number, results in enumerate(rounds, 1):
        for name, result in results.items():
            key = name if name not in steps else f"{name}, round {number}"
            steps[key] = {"round": number, **result}
    return steps


def reference(steps: dict[str, Any], name: str) -> str:
    """vLLM's chain in the round of this contestant."""
    number = steps[name]["round"]
    return REFERENCE if steps[REFERENCE]["round"] == number else f"{REFERENCE}, round {number}"


def ratios(steps: dict[str, Any], kernels: dict[str, Any]) -> dict[str, float]:
    """The figures that are held to a target, as far as they were measured."""

    def step(name: str, batch: int) -> float:
        cell = f"1000:{batch}"
        chain = steps[reference(steps, name)]["cells"][cell]["median_ms"]
        return steps[name]["cells"][cell]["median_ms"] / chain

    wanted = {
        "step_tree63_over_chain15_b1": lambda: step("tree63", 1),
        "step_tree63_over_chain15_b4": lambda: step("tree63", 4),
        "step_tree15_over_chain15_b16": lambda: step("tree15", 16),
        "chain_policy_over_vllm_chain_b1": lambda: step("chain15", 1),
        "chain_policy_over_vllm_chain_b16": lambda: step("chain15", 16),
        "capacity_over_vllm_chain": lambda: (
            capacity(steps, "tree63") / capacity(steps, reference(steps, "tree63"))
        ),
        "overhead_ms_b16_n31": lambda: kernels["tree"]["b16_n31"]["overhead_ms"],
        "gdn_commit_over_copy_b16": lambda: kernels["commit"]["b16"]["over_copy"],
        "gdn_verify64_over_per_row_b4": lambda: (
            kernels["gdn"]["b4_rows64"]["verify"] / kernels["gdn"]["b4_rows64"]["vllm_per_row"]
        ),
        "attention64_32k_over_fa3_b4": lambda: (
            kernels["attention"]["b4_rows64_context32768"]["prefix_and_suffix"]
            / kernels["attention"]["b4_rows64_context32768"]["fa3_causal"]
        ),
    }
    found = {}
    for key, value in wanted.items():
        try:
            found[key] = round(value(), 4)
        except KeyError as missing:
            print(f"{key}: not measured ({missing})")
    return found


def capacity(steps: dict[str, Any], name: str) -> float:
    """Requests of 8,192 tokens whose caches fit beside the weights of the whole model.

    Bytes a request: vLLM's own count. Memory left for caches: the GPU's at 0.92, less the weights
    (55.6 GB and the drafter's 3.46 GB), less what this process holds beside weights and cache.
    """
    ready, cache = steps[name]["ready"], steps[name]["capacity"]
    shared = 4 * 0.8e9 + 2 * 248320 * 5120 * 2 + 3.46e9  # weights of a contestant: 4 layers' worth
    beside = max(0.0, ready["reserved_bytes"] - cache["cache_bytes"] - shared)
    left = MEMORY_UTILISATION * 139.8 * GIB - 55.6e9 - 3.46e9 - beside
    return left / (cache["cache_bytes"] / cache["concurrency"])


def categories(kernels: list[list[Any]]) -> dict[str, float]:
    """Milliseconds of a step by category."""
    sums = {name: 0.0 for name, _ in CATEGORIES}
    for kernel, micros, _ in kernels:
        name = next(n for n, patterns in CATEGORIES if any(p in kernel for p in patterns))
        sums[name] += micros / 1e3
    return sums


def tokens_per_step(acceptance: dict[str, Any], name: str) -> float:
    """The demo pair's, of this contestant; vLLM's chain accepts what a chain accepts."""
    name = name.split(",", maxsplit=1)[0].removeprefix("vllm-")
    if name == "ar":
        return 1.0
    return acceptance["tokens_per_step"][name][ACCEPTANCE_CELL]["tokens_per_step"]


def tokens_per_second(
    steps: dict[str, Any], acceptance: dict[str, Any]
) -> dict[str, dict[str, float]]:
    table: dict[str, dict[str, float]] = {}
    for name, result in steps.items():
        for cell, figures in result["cells"].items():
            if "median_ms" in figures:
                batch = int(cell.split(":")[1])
                rate = 1e3 * batch * tokens_per_step(acceptance, name) / figures["median_ms"]
                table.setdefault(cell, {})[name] = round(rate, 1)
    return table


def acceptance_page(acceptance: dict[str, Any]) -> str:
    """Tokens per step as Markdown: a table for each context, a row for each temperature."""
    found = {n: cells for n, cells in acceptance["tokens_per_step"].items() if "error" not in cells}
    lines = [
        "# Acceptance of the demo pair",
        "",
        "Tokens per step in the engine, the bonus token included. Prompts are held out from training: "
        f"`mixed` is half source, half chat, a number is that many tokens of source; at most "
        f"{acceptance['new_tokens']} new tokens each, {acceptance['batch']} requests at a time.",
        "",
    ]
    for context, prompts in acceptance["prompts"].items():
        lines += [
            f"| {context}, {prompts} prompts: temperature | {' | '.join(found)} |",
            "| --- |" + " --- |" * len(found),
        ]
        for temperature in acceptance["temperatures"]:
            cell = f"{context}:{temperature:g}"
            figures = (f"{cells[cell]['tokens_per_step']:.2f}" for cells in found.values())
            lines.append(f"| {temperature:g} | {' | '.join(figures)} |")
        lines.append("")
    return "\n".join(lines)


def acceptance_plot(acceptance: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    found = {n: cells for n, cells in acceptance["tokens_per_step"].items() if "error" not in cells}
    contexts, temperatures = list(acceptance["prompts"]), acceptance["temperatures"]
    trees = {int(n.removeprefix("tree")): n for n in found if n.startswith("tree")}
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2))
    for i, temperature in enumerate(temperatures):
        cell = f"{contexts[0]}:{temperature:g}"
        points = [(b, found[n][cell]["tokens_per_step"]) for b, n in sorted(trees.items())]
        if points:
            left.plot(
                *zip(*points, strict=True), f"C{i}o-", label=f"tree, temperature {temperature:g}"
            )
        if "chain15" in found:
            height = found["chain15"][cell]["tokens_per_step"]
            left.plot([15], [height], f"C{i}x", label=f"chain of 15, temperature {temperature:g}")
    left.set_xscale("log", base=2)
    left.set_xlabel("nodes")
    left.set_title(f"tokens per step, prompts {contexts[0]}")
    for name, cells in found.items():
        heights = [cells[f"{c}:{temperatures[0]:g}"]["tokens_per_step"] for c in contexts]
        right.plot(contexts, heights, marker="o", label=name)
    right.set_xlabel("tokens of the prompt")
    right.set_title(f"tokens per step, temperature {temperatures[0]:g}")
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def report_acceptance(acceptance: dict[str, Any], provenance: dict[str, Any], stem: Path) -> None:
    stem = stem.with_name(stem.name + "-acceptance")
    stem.with_suffix(".json").write_text(json.dumps(provenance | acceptance, indent=1) + "\n")
    acceptance_plot(acceptance, stem.with_suffix(".png"))
    page = acceptance_page(acceptance)
    where = ", ".join(f"{k} {v}" for k, v in provenance.items() if isinstance(v, str))
    stem.with_suffix(".md").write_text(f"{page}\n![acceptance]({stem.name}.png)\n\n{where}\n")
    print(page)


def plots(
    steps: dict[str, Any], kernels: dict[str, Any], acceptance: dict[str, Any], stem: Path
) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2))
    rates = tokens_per_second(steps, acceptance)
    for name, result in steps.items():
        if name.startswith(f"{REFERENCE},"):
            continue
        cells = [
            (int(cell.split(":")[1]), figures["median_ms"], rates[cell][name])
            for cell, figures in result["cells"].items()
            if cell.startswith("1000:") and "median_ms" in figures
        ]
        batches, times, tokens = zip(*cells, strict=True)
        left.plot(batches, times, marker="o", label=name)
        right.plot(batches, tokens, marker="o", label=name)
    for axes, title in ((left, "milliseconds a step"), (right, "tokens per second")):
        axes.set_xscale("log", base=2)
        axes.set_xlabel("batch")
        axes.set_title(f"{title}, context 1,000")
        axes.grid(alpha=0.3)
        axes.legend()
    figure.tight_layout()
    figure.savefig(stem.with_name(stem.name + "-steps.png"), dpi=110)

    bars = [
        (
            "\n".join([*name.split(", "), f"batch {cell.split(':')[1]}"]),
            categories(profile["kernels"]),
        )
        for name, result in steps.items()
        for cell, profile in result["profiles"].items()
        if "kernels" in profile
    ]
    if bars:
        figure, axes = plt.subplots(figsize=(11, 4.2))
        bottoms = [0.0] * len(bars)
        for category, _ in CATEGORIES:
            heights = [sums[category] for _, sums in bars]
            axes.bar([label for label, _ in bars], heights, bottom=bottoms, label=category)
            bottoms = [b + h for b, h in zip(bottoms, heights, strict=True)]
        axes.tick_params(axis="x", labelsize=7)
        axes.set_ylabel("kernel milliseconds a step")
        axes.legend()
        figure.tight_layout()
        figure.savefig(stem.with_name(stem.name + "-profile.png"), dpi=110)

    figure, axes = plt.subplots(figsize=(9, 4.2))
    labels = list(kernels["gdn"])
    places = range(len(labels))
    for shift, key in ((-0.2, "verify"), (0.2, "vllm_per_row")):
        axes.bar(
            [p + shift for p in places], [kernels["gdn"][n][key] for n in labels], 0.4, label=key
        )
    axes.set_xticks(list(places), [n.replace("_", "\n") for n in labels])
    axes.set_ylabel("microseconds a layer")
    axes.legend()
    figure.tight_layout()
    figure.savefig(stem.with_name(stem.name + "-gdn.png"), dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=Path, nargs="+", metavar="FILE", help="one for each round")
    parser.add_argument("--kernels", type=Path)
    parser.add_argument("--acceptance", type=Path)
    parser.add_argument("--provenance", type=Path, required=True)
    parser.add_argument("--name", required=True)
    parser.add_argument("--directory", type=Path, default=Path("docs/benchmarks"))
    args = parser.parse_args()
    provenance = json.loads(args.provenance.read_text())
    stem = args.directory / args.name
    if not args.acceptance or bool(args.steps) != bool(args.kernels):
        parser.error("give --acceptance, alone or with --steps and --kernels")
    acceptance = json.loads(args.acceptance.read_text())
    report_acceptance(acceptance, provenance, stem)
    if not args.steps:
        return
    steps = merged([json.loads(file.read_text()) for file in args.steps])
    kernels = json.loads(args.kernels.read_text())
    for result in steps.values():
        for profile in result["profiles"].values():
            if "kernels" in profile:
                profile["categories_ms"] = categories(profile["kernels"])
                profile["kernels"] = [row for row in profile["kernels"] if row[1] >= 20]
    report = {
        **provenance,
        "ratios": ratios(steps, kernels),
        "tokens_per_second": tokens_per_second(steps, acceptance),
        "acceptance": {name: tokens_per_step(acceptance, name) for name in steps},
        "capacity_8192": {
            name: round(capacity(steps, name), 1)
            for name, result in steps.items()
            if "capacity" in result
        },
        "steps": steps,
        "kernels": kernels,
    }
    stem.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n")
    plots(steps, kernels, acceptance, stem)
    print(
        json.dumps(
            {key: report[key] for key in ("ratios", "tokens_per_second", "capacity_8192")}, indent=1
        )
    )


if __name__ == "__main__":
    main()
