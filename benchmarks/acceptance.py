# SPDX-License-Identifier: Apache-2.0
"""Tokens per step of the demo pair in the engine: by budget, context length and temperature.

    python benchmarks/acceptance.py --out FILE.json

Prompts are held out from training, drawn as for docs/demo-pair.md: `mixed` is that very selection
(half source, half chat, 16 to 255 tokens), a number is that many tokens of held-out source. They come
from build/demo-pair, which `tools/build_corpus.py` and `tools/train_demo_pair.py prepare` write with
the Python that the pair was trained on; `--prompts FILE` keeps them for a machine without it.

Every contestant is one engine, in a process of its own; on a GPU they run side by side. Tokens per
step is what a request gets from one verification, the bonus token included, over all requests.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from contestants import engine_options

ROOT = Path(__file__).parents[1]
MIXED = "mixed"
NEW_TOKENS = 128


def held_out(args: argparse.Namespace) -> dict[str, list[list[int]]]:
    """Prompts by context, from `args.prompts` where that file exists, else made and written there."""
    if args.prompts.is_file():
        kept = json.loads(args.prompts.read_text())
        if {context: len(group) for context, group in kept.items()} != dict.fromkeys(
            args.contexts, args.count
        ):
            sys.exit(f"{args.prompts} holds other prompts than these options ask for; remove it")
        return kept
    tokenizer = args.work / "tokenizer.json"
    if not tokenizer.is_file():
        sys.exit(f"{args.work} is not there; make it with {PREPARE}, or give --prompts FILE")
    if tokenizer.read_bytes() != (args.pair / "target/tokenizer.json").read_bytes():
        sys.exit(
            f"{args.work} was prepared from another Python's library than the pair was trained on, "
            "so its tokens are not the pair's; give --prompts FILE, written on a machine that has it"
        )
    sys.path.insert(0, str(ROOT / "tools"))
    import torch
    from demo_pair import data
    from train_demo_pair import heldout_prompts

    _, _, held, _ = data.load(args.work)
    prompts = {}
    for context in args.contexts:
        if context == MIXED:
            prompts[context] = heldout_prompts(held, args.count, seed=args.seed)
        else:
            generator = torch.Generator().manual_seed(args.seed)
            prompts[context] = held.windows(args.count, int(context), generator).tolist()
    args.prompts.parent.mkdir(parents=True, exist_ok=True)
    args.prompts.write_text(json.dumps(prompts) + "\n")
    return prompts


PREPARE = "tools/build_corpus.py and tools/train_demo_pair.py prepare"


def end_tokens(target: Path) -> list[int]:
    """What ends a text. Without its tokenizer vLLM does not know."""
    return json.loads((target / "generation_config.json").read_text())["eos_token_id"]


def engine(name: str, args: argparse.Namespace, longest: int) -> dict[str, Any]:
    options = engine_options(name, str(args.pair / "drafter")) | {
        "model": str(args.pair / "target"),
        "skip_tokenizer_init": True,
        "max_model_len": longest + NEW_TOKENS,
        "max_num_seqs": args.batch,
        "enable_prefix_caching": False,
        "disable_log_stats": False,
        "seed": 0,
    }
    if "TRITON_INTERPRET" in os.environ:
        options.pop("attention_backend", None)
        return options | {"dtype": "float32", "enforce_eager": True}
    return options | {
        "dtype": "bfloat16",
        "gdn_prefill_backend": "triton",
        "gpu_memory_utilization": 0.08,
        "kv_cache_memory_bytes": 4 << 30,
        "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"},
    }


def measure(spec: dict[str, Any]) -> None:
    """The part in a process of its own: one engine, all its cells, into `spec["out"]`."""
    from vllm import LLM, SamplingParams

    llm = LLM(**spec["engine"])

    def counted() -> dict[str, float]:
        return {m.name: m.value for m in llm.get_metrics() if hasattr(m, "value")}

    cells = {}
    for context, prompts in json.loads(Path(spec["prompts"]).read_text()).items():
        for temperature in spec["temperatures"]:
            began, before = time.perf_counter(), counted()
            params = [
                SamplingParams(
                    temperature=temperature,
                    seed=seed,
                    max_tokens=spec["new_tokens"],
                    stop_token_ids=spec["end_tokens"],
                    detokenize=False,
                )
                for seed in range(len(prompts))
            ]
            answers = llm.generate(
                [{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False
            )
            after = counted()
            drafts, accepted = (
                after[name] - before[name]
                for name in (
                    "vllm:spec_decode_num_drafts",
                    "vllm:spec_decode_num_accepted_tokens",
                )
            )
            cells[f"{context}:{temperature:g}"] = {
                "tokens_per_step": round(1 + accepted / drafts, 3),
                "verifications": int(drafts),
                "tokens": sum(len(answer.outputs[0].token_ids) for answer in answers),
                "seconds": round(time.perf_counter() - began, 2),
            }
    Path(spec["out"]).write_text(json.dumps(cells))


def run(args: argparse.Namespace, prompts: dict[str, list[list[int]]]) -> dict[str, Any]:
    """All contestants, `args.side_by_side` at a time; what one could not be measured says why."""
    longest = max(len(prompt) for group in prompts.values() for prompt in group)
    waiting = args.contestants.split(",")
    running: dict[str, subprocess.Popen] = {}
    found: dict[str, Any] = {}
    deadline = time.monotonic() + args.timeout
    args.logs.mkdir(parents=True, exist_ok=True)
    environment = os.environ | {
        "VLLM_USE_V2_MODEL_RUNNER": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
    }
    try:
        while waiting or running:
            while waiting and len(running) < args.side_by_side:
                name = waiting.pop(0)
                spec = {
                    "engine": engine(name, args, longest),
                    "prompts": str(args.prompts),
                    "temperatures": args.temperatures,
                    "new_tokens": args.new_tokens,
                    "end_tokens": end_tokens(args.pair / "target"),
                    "out": str(args.logs / f"acceptance-{name}.json"),
                }
                with (args.logs / f"acceptance-{name}.log").open("w") as log:
                    running[name] = subprocess.Popen(
                        [sys.executable, __file__, "--engine", json.dumps(spec)],
                        env=environment,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                    )
            for name, process in list(running.items()):
                if process.poll() is None:
                    continue
                del running[name]
                if process.returncode:
                    found[name] = {"error": f"see {args.logs}/acceptance-{name}.log"}
                else:
                    out = args.logs / f"acceptance-{name}.json"
                    found[name] = json.loads(out.read_text())
                print(name, json.dumps(found[name]), flush=True)
            if time.monotonic() > deadline:
                sys.exit(f"not ready after {args.timeout} s: {', '.join(running)}")
            time.sleep(0.2)
    finally:
        for process in running.values():
            process.kill()
            process.wait(timeout=30)
    return {name: found[name] for name in args.contestants.split(",")}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--engine", help=argparse.SUPPRESS)
    add("--contestants", default="chain15,tree15,tree31,tree63,tree127")
    add("--contexts", nargs="+", default=[MIXED, "256", "512", "1024", "2048"])
    add("--temperatures", nargs="+", type=float, default=[0.0, 0.6, 1.0])
    add("--count", type=int, default=128, help="prompts of a context")
    add("--new-tokens", type=int, default=NEW_TOKENS)
    add("--batch", type=int, default=16)
    add("--seed", type=int, default=20)
    add("--pair", type=Path, default=ROOT / "demo")
    add("--work", type=Path, default=ROOT / "build/demo-pair")
    add("--prompts", type=Path, default=ROOT / "build/benchmarks/acceptance-prompts.json")
    add("--prompts-only", action="store_true", help="write --prompts and end")
    add("--side-by-side", type=int, default=1 if "TRITON_INTERPRET" in os.environ else 5)
    add("--timeout", type=float, default=540)
    add("--logs", type=Path, default=ROOT / "build/benchmarks")
    add("--out", type=Path)
    args = parser.parse_args()
    if args.engine:
        measure(json.loads(args.engine))
        return
    prompts = held_out(args)
    if args.prompts_only:
        return
    if args.out is None:
        parser.error("--out FILE.json is missing")
    began = time.monotonic()
    result = {
        "prompts": {context: len(group) for context, group in prompts.items()},
        "new_tokens": args.new_tokens,
        "temperatures": args.temperatures,
        "batch": args.batch,
        "tokens_per_step": run(args, prompts),
    }
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(f"{args.out} written after {time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
