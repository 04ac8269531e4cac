# SPDX-License-Identifier: Apache-2.0
"""What the engine tests share: jobs for real vLLM engines, and the process that runs them."""

from __future__ import annotations

import functools
import json
import os
import random
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ENGINE_PROCESS = Path(__file__).with_name("engine_process.py")
ENGINE_TIMEOUT_S = 900
# tests/conftest.py switches the interpreter on where there is no GPU.
ON_CPU = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE_OPTIONS: dict[str, Any] = (
    {
        "worker_cls": "ddtree_vllm.engine.worker.DDTreeCPUWorker",
        "dtype": "float32",
        "enforce_eager": True,
    }
    if ON_CPU
    else {
        "worker_cls": "ddtree_vllm.engine.worker.DDTreeWorker",
        "attention_backend": "CUSTOM",
        "dtype": "bfloat16",
        "gdn_prefill_backend": "triton",
        # Small, so that engines of several tests fit on one GPU.
        "gpu_memory_utilization": 0.08,
        "kv_cache_memory_bytes": 2 << 30,
    }
)


@dataclass
class Job:
    """One engine and what it is asked. ``budget`` None: no speculation.

    ``compare_ranks`` brings a digest of the draft trees of every rank at the end. ``driver`` is a
    file and the name of a function in it, which is called with the LLM and ``arguments`` in the
    engine's process, in place of serving ``requests``; what it returns is ``Result.found``.
    """

    requests: list[dict[str, Any]] = field(default_factory=list)
    budget: int | None = None
    policy: str = "ddtree"
    static_tree: list[list[int]] | None = None
    speculative: dict[str, Any] = field(default_factory=dict)
    engine: dict[str, Any] = field(default_factory=dict)
    compare_ranks: bool = False
    driver: tuple[Path, str] | None = None
    arguments: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)

    def spec(self, target: Path, drafter: Path) -> dict[str, Any]:
        engine: dict[str, Any] = {
            "model": str(target),
            "skip_tokenizer_init": True,
            "max_model_len": 512,
            "max_num_seqs": 8,
            "disable_log_stats": False,
            "seed": 0,
        } | DEVICE_OPTIONS
        if self.budget is not None:
            entry: dict[str, Any] = {"budget": self.budget, "policy": self.policy}
            if self.static_tree is not None:
                entry["static_tree"] = self.static_tree
            engine["speculative_config"] = {
                "method": "dflash",
                "model": str(drafter),
                "num_speculative_tokens": self.budget,
            } | self.speculative
            engine["additional_config"] = {"ddtree": entry}
        return {
            "engine": engine | self.engine,
            "requests": self.requests,
            "compare_ranks": self.compare_ranks,
            "driver": None if self.driver is None else [str(self.driver[0]), self.driver[1]],
            "arguments": self.arguments,
            "environment": self.environment,
        }


@dataclass
class Result:
    outputs: list[dict[str, Any]]
    steps: int
    digests: list[str]
    counters: dict[str, float]
    load_s: float
    run_s: float
    found: Any = None

    @property
    def tokens(self) -> list[list[int]]:
        return [output["token_ids"] for output in self.outputs]

    @property
    def tokens_per_step(self) -> float:
        """Tokens a request gets from one verification, averaged over all of them."""
        drafts = self.counters["vllm:spec_decode_num_drafts"]
        return 1 + self.counters["vllm:spec_decode_num_accepted_tokens"] / drafts


def run(
    pair: tuple[Path, Path],
    jobs: list[Job],
    timeout_s: int = ENGINE_TIMEOUT_S,
    processes: int | None = None,
) -> list[Result]:
    """Run the jobs in fresh processes side by side; a failing one shows its log.

    ``processes``: how many, by default one for every job on a GPU, whose engines are small, and two
    on a CPU. Jobs that share one run one after another, with one environment.
    """
    if processes is None:
        processes = min(os.cpu_count() or 1, 2) if ON_CPU else 8
    workers = min(len(jobs), processes)
    with tempfile.TemporaryDirectory() as directory:
        running = [
            _EngineProcess(
                Path(directory), number, [job.spec(*pair) for job in jobs[number::workers]]
            )
            for number in range(workers)
        ]
        try:
            shares = [process.results(timeout_s) for process in running]
        finally:
            for process in running:
                process.end()
    return [shares[i % workers][i // workers] for i in range(len(jobs))]


class _EngineProcess:
    def __init__(self, directory: Path, number: int, specs: list[dict[str, Any]]) -> None:
        jobs, self._results = (
            directory / f"jobs-{number}.json",
            directory / f"results-{number}.json",
        )
        self._log = directory / f"log-{number}"
        assert all(spec["environment"] == specs[0]["environment"] for spec in specs)
        jobs.write_text(json.dumps(specs))
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, str(ENGINE_PROCESS), str(jobs), str(self._results)],
                env=engine_environment() | specs[0]["environment"],
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def results(self, timeout_s: int) -> list[Result]:
        code = self._process.wait(timeout=timeout_s)
        if code != 0:
            tail = "\n".join(self._log.read_text().splitlines()[-60:])
            raise RuntimeError(f"engine process ended with {code}:\n{tail}")
        return [Result(**result) for result in json.loads(self._results.read_text())]

    def end(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait(timeout=30)


def engine_environment() -> dict[str, str]:
    common = os.environ | {
        "VLLM_USE_V2_MODEL_RUNNER": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        # Lets a test send a function to every rank.
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
    }
    if not ON_CPU:
        return common | {"VLLM_USE_FLASHINFER_SAMPLER": "0"}
    return common | {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_CI_ENV": "1",
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OPENBLAS_NUM_THREADS": "1",
    }


def random_prompts(rng: random.Random, lengths: list[int], vocab: int) -> list[list[int]]:
    return [[rng.randrange(4, vocab) for _ in range(length)] for length in lengths]


def greedy_continuation(
    target: Path, prompt: list[int], length: int, allowed: list[int] | None = None
) -> list[int]:
    """What the target says next, of ``allowed`` tokens, by Hugging Face's model in float32."""
    import torch

    tokens = list(prompt)
    for _ in range(length):
        with torch.inference_mode():
            logits = _hugging_face(target)(torch.tensor([tokens])).logits[0, -1]
        if allowed is None:
            tokens.append(int(logits.argmax()))
        else:
            tokens.append(allowed[int(logits[allowed].argmax())])
    return tokens[len(prompt) :]


@functools.cache
def _hugging_face(target: Path):
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
