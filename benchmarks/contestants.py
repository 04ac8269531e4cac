# SPDX-License-Identifier: Apache-2.0
"""One engine of the step benchmark, in a process of its own that steps when it is told to.

    python benchmarks/contestants.py SPEC      reads commands on stdin, a JSON object a line

Several contestants stay resident on one GPU and take turns, so that all see the same machine in the
same minutes. What makes room for them: the layers of a contestant's model share the weights of its
first few layers. Dummy weights cost the same time wherever they lie, as a layer has far more of them
(0.8 GB on the 27B shape) than the GPU has cache (60 MB).
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ddtree_vllm.config import WORKER

# Layers of a target that keep weights of their own: one period of three recurrent and one attention.
PERIOD = 4


def engine_options(name: str, drafter: str) -> dict[str, Any]:
    """Engine options of `ar`, `vllm-chainN`, `chainN` or `treeN`."""
    if name == "ar":
        return {}
    kind = name.rstrip("0123456789")
    budget = int(name[len(kind) :])
    options: dict[str, Any] = {
        "speculative_config": {
            "method": "dflash",
            "model": drafter,
            "num_speculative_tokens": budget,
        }
    }
    if kind == "vllm-chain":
        return options
    policy = {"chain": "chain", "tree": "ddtree"}[kind]
    return options | {
        "worker_cls": WORKER["cpu" if "TRITON_INTERPRET" in os.environ else "cuda"],
        "attention_backend": "CUSTOM",
        "additional_config": {"ddtree": {"budget": budget, "policy": policy}},
    }


def is_stock(name: str) -> bool:
    """Whether the contestant is vLLM as it is shipped, without this plugin."""
    return name == "ar" or name.startswith("vllm-")


def share_layers(model: Any) -> int:
    """Lets every layer use the weights of the first ones; returns the bytes that are left."""
    seen: dict[int, int] = {}
    for module in model.modules():
        layers = getattr(module, "layers", None)
        if layers is None or len(layers) <= PERIOD:
            continue
        for i in range(PERIOD, len(layers)):
            first = dict(layers[i % PERIOD].named_parameters())
            for key, parameter in layers[i].named_parameters():
                if key in first and first[key].shape == parameter.shape:
                    parameter.data = first[key].data
            # What the parameters of a layer are views of stays with it as a buffer.
            sources = dict(layers[i % PERIOD].named_modules())
            for key, part in layers[i].named_modules():
                for name, buffer in part.named_buffers(recurse=False):
                    other = getattr(sources.get(key), name, None)
                    if other is not None and other.shape == buffer.shape:
                        setattr(part, name, other)
    for parameter in model.parameters():
        seen[parameter.data_ptr()] = parameter.numel() * parameter.element_size()
    return sum(seen.values())


@contextlib.contextmanager
def shared_dummy_weights(lock: Path) -> Iterator[list[int]]:
    """While models load: one process at a time holds a whole model, then gives most of it back."""
    import torch
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    kept: list[int] = []
    whole = DummyModelLoader.load_model

    def load_model(self: Any, *args: Any, **kwargs: Any) -> Any:
        with lock.open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            model = whole(self, *args, **kwargs)
            kept.append(share_layers(model))
            torch.cuda.empty_cache()
        return model

    DummyModelLoader.load_model = load_model
    try:
        yield kept
    finally:
        DummyModelLoader.load_model = whole


class Contestant:
    """A running engine whose requests and steps are counted out by the benchmark."""

    def __init__(self, spec: dict[str, Any]) -> None:
        from vllm import LLM

        self.vocab: int = spec["vocab"]
        self.rng = random.Random(0)
        self.running: list[str] = []
        self.created = 0
        started = time.perf_counter()
        if spec.get("share"):
            with shared_dummy_weights(Path(spec["share"])) as kept:
                self.llm = LLM(**spec["engine"])
            self.weight_bytes = sum(kept)
        else:
            self.llm = LLM(**spec["engine"])
            self.weight_bytes = 0
        self.engine = self.llm.llm_engine
        self.load_s = time.perf_counter() - started

    def ready(self) -> dict[str, Any]:
        import torch

        answer: dict[str, Any] = {"load_s": self.load_s, "weight_bytes": self.weight_bytes}
        if torch.cuda.is_available():
            answer["reserved_bytes"] = torch.cuda.memory_reserved()
        return answer

    def batch(self, size: int, context: int) -> dict[str, Any]:
        """Grows the batch to `size` requests of `context` tokens, all decoding."""
        from vllm import SamplingParams

        fresh = set()
        while len(self.running) < size:
            name = f"r{self.created}"
            self.created += 1
            prompt = [self.rng.randrange(4, self.vocab) for _ in range(context)]
            params = SamplingParams(
                max_tokens=4096, temperature=0.0, ignore_eos=True, detokenize=False
            )
            self.engine.add_request(name, {"prompt_token_ids": prompt}, params)
            self.running.append(name)
            fresh.add(name)
        while fresh:
            fresh -= {output.request_id for output in self.engine.step()}
        return {}

    def steps(self, count: int, warm: int) -> dict[str, Any]:
        """Wall milliseconds of `count` steps after `warm` uncounted ones."""
        synchronize()
        for _ in range(warm):
            self.engine.step()
        times = []
        for _ in range(count):
            began = time.perf_counter()
            self.engine.step()
            times.append(1e3 * (time.perf_counter() - began))
        synchronize()
        return {"ms": times}

    def profile(self, count: int) -> dict[str, Any]:
        """Kernels of a step: [name, microseconds a step, calls a step], longest first.

        `busy_us` is how long the device works in a step and `idle_us` how long it does not between the
        first of these steps and the last: kernels that overlap count once.
        """
        import torch

        self.steps(0, 3)
        activities = [torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as profiler:
            for _ in range(count):
                self.engine.step()
            synchronize()
        rows = [
            (e.key, e.self_device_time_total / count, e.count / count)
            for e in profiler.key_averages()
            if e.self_device_time_total > 0
        ]
        spans = sorted(
            (e.time_range.start, e.time_range.end)
            for e in profiler.events()
            if e.device_type == torch.autograd.DeviceType.CUDA and e.time_range.end > 0
        )
        busy = busy_time(spans)
        idle = max(end for _, end in spans) - spans[0][0] - busy
        return {
            "kernels": sorted(rows, key=lambda row: -row[1]),
            "busy_us": busy / count,
            "idle_us": idle / count,
        }

    def clear(self) -> dict[str, Any]:
        self.engine.abort_request(self.running)
        self.running = []
        while self.engine.has_unfinished_requests():
            self.engine.step()
        synchronize()
        return {}

    def capacity(self, context: int) -> dict[str, Any]:
        """Bytes of cache that a request of `context` tokens takes, as vLLM itself counts them."""
        import copy

        from vllm.v1.core.kv_cache_utils import get_max_concurrency_for_kv_cache_config

        core = self.engine.engine_core.engine_core
        config = copy.copy(core.vllm_config)
        config.model_config = copy.copy(config.model_config)
        config.model_config.max_model_len = context
        cache = core.scheduler.kv_cache_config
        concurrency = get_max_concurrency_for_kv_cache_config(config, cache)
        total = config.cache_config.kv_cache_memory_bytes
        return {"concurrency": concurrency, "cache_bytes": total}


def busy_time(spans: list[tuple[float, float]]) -> float:
    """Length of the union of spans, which come by their beginnings."""
    total, reached = 0.0, float("-inf")
    for begin, end in spans:
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total


def synchronize() -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def main() -> None:
    # Answers go to the real standard output; whatever else prints there goes to the log.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    contestant = Contestant(json.loads(sys.argv[1]))
    answers.write(json.dumps(contestant.ready()) + "\n")
    for line in sys.stdin:
        command = json.loads(line)
        method = command.pop("do")
        try:
            answer = getattr(contestant, method)(**command)
        except Exception as error:  # told to the benchmark, which goes on without this figure
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main()
