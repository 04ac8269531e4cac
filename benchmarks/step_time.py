# SPDX-License-Identifier: Apache-2.0
"""Time of one decode step on the Qwen3.6-27B shape with dummy weights, contestant by contestant.

    python benchmarks/step_time.py --contestants vllm-chain15,chain15,tree63 --batches 1,4 --out FILE.json

Each contestant runs in a process of its own. Dummy weights accept next to nothing, so every step
emits about one token for every contestant: this measures steps, not tokens per second.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from shapes import LAYERS, VOCAB, write_shapes

GPU_WORKER = "ddtree_vllm.engine.worker.DDTreeWorker"


def contestant_options(name: str, drafter: Path) -> dict:
    """Engine options of `ar`, `vllm-chainN`, `chainN` or `treeN`."""
    if name == "ar":
        return {}
    kind, budget = name.rstrip("0123456789"), int(name[len(name.rstrip("0123456789")) :])
    options: dict = {
        "speculative_config": {
            "method": "dflash",
            "model": str(drafter),
            "num_speculative_tokens": budget,
        }
    }
    if kind == "vllm-chain":
        return options
    policy = {"chain": "chain", "tree": "ddtree"}[kind]
    return options | {
        "worker_cls": GPU_WORKER,
        "attention_backend": "CUSTOM",
        "additional_config": {"ddtree": {"budget": budget, "policy": policy}},
    }


def measure(args: argparse.Namespace) -> dict:
    """In the contestant's process: load, then time steps at every batch size."""
    import torch
    from vllm import LLM, SamplingParams

    started = time.perf_counter()
    llm = LLM(**json.loads(args.engine))
    loaded = time.perf_counter() - started
    engine, rng = llm.llm_engine, random.Random(0)
    results = {}
    for batch in map(int, args.batches.split(",")):
        for i in range(batch):
            prompt = [rng.randrange(VOCAB - 300) for _ in range(args.context)]
            params = SamplingParams(
                max_tokens=4 * args.steps, temperature=0.0, ignore_eos=True, detokenize=False
            )
            engine.add_request(f"{batch}-{i}", {"prompt_token_ids": prompt}, params)
        seen: set[str] = set()
        while len(seen) < batch:
            seen |= {output.request_id for output in engine.step()}
        for _ in range(10):
            engine.step()
        torch.cuda.synchronize()
        times = []
        profile = None
        for _ in range(args.steps):
            t = time.perf_counter()
            engine.step()
            times.append(1e3 * (time.perf_counter() - t))
        if args.profile:
            profile = profile_step(engine)
        engine.abort_request([f"{batch}-{i}" for i in range(batch)])
        while engine.has_unfinished_requests():
            engine.step()
        results[batch] = {
            "median_ms": statistics.median(times),
            "mean_ms": statistics.fmean(times),
            "profile": profile,
        }
        print(args.name, "batch", batch, f"{results[batch]['median_ms']:.2f} ms", flush=True)
        if profile:
            for kernel, micros, calls in profile[:28]:
                print(f"    {micros:9.1f} us {calls:5.1f}x {kernel[:110]}", flush=True)
    return {"load_s": loaded, "batches": results}


def profile_step(engine, steps: int = 5) -> list[tuple[str, float, float]]:
    """Kernels of a step: (name, microseconds a step, calls a step), longest first."""
    import torch

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(steps):
            engine.step()
        torch.cuda.synchronize()
    rows = [
        (e.key, e.self_device_time_total / steps, e.count / steps)
        for e in profiler.key_averages()
        if e.self_device_time_total > 0
    ]
    return sorted(rows, key=lambda row: -row[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--contestants", default="vllm-chain15,chain15,tree63")
    parser.add_argument("--batches", default="1,4")
    parser.add_argument("--context", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--max-num-seqs", type=int, default=16)
    parser.add_argument("--mode", choices=["default", "0"], default="default")
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--name", help=argparse.SUPPRESS)
    parser.add_argument("--engine", help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.engine:
        args.result.write_text(json.dumps(measure(args)))
        return
    results = {}
    with tempfile.TemporaryDirectory() as directory:
        target, drafter = write_shapes(Path(directory), args.layers)
        for name in args.contestants.split(","):
            engine = {
                "model": str(target),
                "load_format": "dummy",
                "skip_tokenizer_init": True,
                "dtype": "bfloat16",
                "max_model_len": args.context + 8192,
                "max_num_seqs": args.max_num_seqs,
                "gpu_memory_utilization": 0.9,
                "enable_prefix_caching": False,
                "gdn_prefill_backend": "triton",
                "enforce_eager": args.eager,
            } | contestant_options(name, drafter)
            if args.mode == "0" and not args.eager:
                engine["compilation_config"] = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
            result = Path(directory, f"{name}.json")
            environment = os.environ | {
                "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
                "VLLM_USE_V2_MODEL_RUNNER": "1",
                "VLLM_USE_FLASHINFER_SAMPLER": "0",
                "VLLM_NO_USAGE_STATS": "1",
                "HF_HUB_OFFLINE": "1",
            }
            if name == "ar" or name.startswith("vllm-"):
                environment["VLLM_PLUGINS"] = "none"  # vLLM as it is shipped
            process = subprocess.run(
                [
                    sys.executable, __file__, "--name", name, "--engine", json.dumps(engine),
                    "--result", str(result), "--batches", args.batches,
                    "--context", str(args.context), "--steps", str(args.steps),
                    *(["--profile"] if args.profile else []),
                ],
                env=environment,
                check=False,
            )  # fmt: skip
            if process.returncode == 0:
                results[name] = json.loads(result.read_text())
            else:
                print(f"{name}: failed with exit code {process.returncode}", flush=True)
            if args.out:
                args.out.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
