# SPDX-License-Identifier: Apache-2.0
"""Time of one decode step, contestants taking turns on one GPU.

    python benchmarks/step_time.py --contestants vllm-chain15,chain15,tree15,tree63 \
        --cells 1000:1,2,4,8,16 8000:1,4 32000:1,2 --profile 1000:1,4 --out FILE.json

By default the whole Qwen3.6-27B shape and its drafter's, bfloat16, with dummy weights and vLLM's
default compile mode. Dummy weights accept next to nothing: this measures steps; tokens per second
follow from the acceptance that the demo pair has at the same budget.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from contestants import engine_options, is_stock
from shapes import LAYERS, VOCAB, write_shapes

GIB = 1 << 30


class Player:
    """The process of one contestant, from this side."""

    def __init__(self, name: str, spec: dict[str, Any], log: Path) -> None:
        self.name = name
        self.max_num_seqs: int = spec["engine"]["max_num_seqs"]
        self.log = log
        environment = {
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            "VLLM_USE_FLASHINFER_SAMPLER": "0",
            **os.environ,
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_USE_V2_MODEL_RUNNER": "1",
        }
        if is_stock(name) and spec["stock"]:
            environment["VLLM_PLUGINS"] = "none"
        script = Path(__file__).with_name("contestants.py")
        with log.open("w") as output:
            self.process = subprocess.Popen(
                [sys.executable, str(script), json.dumps(spec)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                text=True,
                env=environment,
            )
        self.answers: list[str] = []
        self.arrived = threading.Condition()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self.arrived:
                self.answers.append(line)
                self.arrived.notify()
        with self.arrived:
            self.answers.append("")
            self.arrived.notify()

    def hear(self, timeout: float) -> dict[str, Any]:
        """The next answer; a contestant that ends or stays silent answers with an error."""
        with self.arrived:
            if not self.arrived.wait_for(lambda: self.answers, timeout):
                return {"error": f"no answer in {timeout:.0f} s"}
            line = self.answers.pop(0)
        if not line:
            return {"error": f"ended with exit code {self.process.wait(10)}; see {self.log}"}
        return json.loads(line)

    def ask(self, timeout: float, **command: Any) -> dict[str, Any]:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(command) + "\n")
            self.process.stdin.flush()
        except OSError:
            return {"error": "ended"}
        return self.hear(timeout)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


def parse_cells(texts: list[str]) -> list[tuple[int, list[int]]]:
    """`CONTEXT:BATCH,BATCH` each; batches ascending, as a batch only grows."""
    cells = []
    for text in texts:
        context, _, batches = text.partition(":")
        cells.append((int(context), sorted(int(b) for b in batches.split(","))))
    return cells


def run(args: argparse.Namespace, results: dict[str, Any], save: Any) -> None:
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        players = start(args, root)
        try:
            playing = []
            for player in players:
                answer = player.hear(args.ready_timeout)
                results[player.name] = {"ready": answer, "cells": {}, "profiles": {}}
                print(player.name, answer, flush=True)
                if "error" not in answer:
                    playing.append(player)
                    if not args.demo:
                        capacity = player.ask(60, do="capacity", context=8192)
                        results[player.name]["capacity"] = capacity
                        print(player.name, capacity, flush=True)
                save()
            profiled = dict(parse_cells(args.profile))
            for context, batches in parse_cells(args.cells):
                for batch in batches:
                    measure(playing, context, batch, args, results)
                    if batch in profiled.get(context, []):
                        for player in playing:
                            answer = player.ask(120, do="profile", count=5)
                            results[player.name]["profiles"][f"{context}:{batch}"] = answer
                    save()
                for player in playing:
                    player.ask(120, do="clear")
        finally:
            for player in players:
                player.end()


def start(args: argparse.Namespace, root: Path) -> list[Player]:
    if args.demo:
        target, drafter = args.demo / "target", args.demo / "drafter"
    else:
        target, drafter = write_shapes(root, args.layers)
    longest = max(context for context, _ in parse_cells(args.cells))
    limits = dict(item.split("=") for item in args.max_num_seqs.split(",") if "=" in item)
    caches = dict(item.split("=") for item in args.cache_gib.split(",") if "=" in item)
    players = []
    for name in args.contestants.split(","):
        options = engine_options(name, str(drafter))
        seqs = int(limits.get(name, args.max_num_seqs.split(",")[0]))
        rows = 1 + options.get("speculative_config", {}).get("num_speculative_tokens", 0)
        engine: dict[str, Any] = {
            "model": str(target),
            "max_model_len": longest + 4096,
            "max_num_seqs": seqs,
            "max_num_batched_tokens": args.max_num_batched_tokens,
            "enable_prefix_caching": False,
        } | options
        if args.demo:
            engine |= {"dtype": "float32", "max_model_len": min(512, longest + 256)}
        else:
            engine |= {
                "load_format": "dummy",
                "skip_tokenizer_init": True,
                "dtype": "bfloat16",
                "gdn_prefill_backend": "triton",
                "gpu_memory_utilization": 0.1,
                "kv_cache_memory_bytes": int(
                    float(caches.get(name, args.cache_gib.split(",")[0])) * GIB
                ),
                "compilation_config": {
                    # The sizes that are measured: capturing all of vLLM's list changes no step.
                    "cudagraph_capture_sizes": [
                        n * rows for n in (1, 2, 4, 8, 16, 32) if n <= seqs and n * rows <= 1024
                    ],
                    **({"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"} if args.mode0 else {}),
                },
            }
        spec = {
            "engine": engine,
            "vocab": 2000 if args.demo else VOCAB - 300,
            "share": None if args.demo else str(root / "lock"),
            "stock": not args.demo,
        }
        players.append(Player(name, spec, args.logs / f"{name}.log"))
    return players


def measure(
    playing: list[Player],
    context: int,
    batch: int,
    args: argparse.Namespace,
    results: dict[str, Any],
) -> None:
    times: dict[str, list[float]] = {}
    errors: dict[str, str] = {}
    for player in playing:
        if batch > player.max_num_seqs:
            errors[player.name] = f"holds {player.max_num_seqs} requests"
            continue
        answer = player.ask(300, do="batch", size=batch, context=context)
        if "error" in answer:
            errors[player.name] = answer["error"]
    for _ in range(args.rounds):
        for player in playing:
            if player.name not in errors:
                answer = player.ask(120, do="steps", count=args.steps, warm=3)
                if "error" in answer:
                    errors[player.name] = answer["error"]
                else:
                    times.setdefault(player.name, []).extend(answer["ms"])
    line = f"context {context} batch {batch}:"
    for player in playing:
        cell: dict[str, Any] = {"error": errors.get(player.name)}
        if player.name not in errors:
            ms = times[player.name]
            cell = {"median_ms": statistics.median(ms), "mean_ms": statistics.fmean(ms)}
            line += f"  {player.name} {cell['median_ms']:.2f}"
        results[player.name]["cells"][f"{context}:{batch}"] = cell
    print(line, *errors.items(), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--contestants", default="vllm-chain15,chain15,tree15,tree63")
    parser.add_argument("--cells", nargs="+", default=["1000:1,4,16"], metavar="CONTEXT:BATCH,…")
    parser.add_argument("--profile", nargs="*", default=[], metavar="CONTEXT:BATCH,…")
    parser.add_argument("--steps", type=int, default=8, help="of a turn")
    parser.add_argument("--rounds", type=int, default=4, help="turns of every contestant")
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--max-num-seqs", default="16", metavar="N[,NAME=N…]")
    parser.add_argument("--cache-gib", default="10", metavar="X[,NAME=X…]")
    parser.add_argument("--max-num-batched-tokens", type=int, default=4096)
    parser.add_argument("--mode0", action="store_true", help="without torch.compile")
    parser.add_argument("--demo", type=Path, help="the demo pair in float32: tries this script")
    parser.add_argument("--ready-timeout", type=float, default=540)
    parser.add_argument("--logs", type=Path, default=Path("build/benchmarks"))
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    args.logs.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {}

    def save() -> None:
        args.out.write_text(json.dumps(results, indent=1) + "\n")

    began = time.monotonic()
    run(args, results, save)
    save()
    print(f"{args.out} written after {time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
