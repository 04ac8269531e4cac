# SPDX-License-Identifier: Apache-2.0
"""Runs real vLLM engines, one after another, for jobs read from a file. Started by ``harness.run``.

    python engine_process.py JOBS.json RESULTS.json

A process of its own, so that an engine's global state ends with it.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from pathlib import Path
from typing import Any


def main(jobs_file: str, results_file: str) -> None:
    with open(jobs_file) as f:
        jobs = json.load(f)
    results = []
    for job in jobs:
        results.append(run_job(job))
        with open(results_file, "w") as f:
            json.dump(results, f)


def run_job(job: dict[str, Any]) -> dict[str, Any]:
    from vllm import LLM

    if job["engine"].get("async_scheduling"):
        _allow_async_scheduling_on_cpu()
    driver = load_driver(*job["driver"]) if job["driver"] else None
    started = time.monotonic()
    llm = LLM(**job["engine"])
    loaded = time.monotonic()
    try:
        outputs: list[dict] = []
        steps, found = 0, None
        if driver is not None:
            found = driver(llm, **job["arguments"])
        else:
            outputs, steps = serve(llm, job["requests"])
        digests = llm.collective_rpc(digest_of_trees) if job["compare_ranks"] else []
        counters = {
            m.name: m.value
            for m in llm.get_metrics()
            if m.name.startswith("vllm:") and hasattr(m, "value")
        }
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()
        from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

        cleanup_dist_env_and_memory()
    return {
        "outputs": outputs,
        "steps": steps,
        "digests": digests,
        "counters": counters,
        "load_s": loaded - started,
        "run_s": time.monotonic() - loaded,
        "found": found,
    }


def load_driver(file: str, function: str) -> Any:
    """A function of a test's own file. What it sends to workers travels by value."""
    import importlib

    import cloudpickle

    path = Path(file)
    sys.path.insert(0, str(path.parent))
    module = importlib.import_module(path.stem)
    cloudpickle.register_pickle_by_value(module)
    return getattr(module, function)


def digest_of_trees(worker: Any) -> str:
    """Of the trees that the newest step of every request drafted on this rank."""
    import hashlib

    tree = worker.model_runner.model_state.tree
    digest = hashlib.sha256()
    for field in (tree.tokens, tree.parents, tree.depths, tree.ranks, tree.num_nodes):
        digest.update(field.cpu().numpy().tobytes())
    return digest.hexdigest()


def _allow_async_scheduling_on_cpu() -> None:
    """vLLM's CPU platform always switches it off; what it does to a step can be tested all the same."""
    from vllm.platforms import current_platform

    platform = type(current_platform)
    if not current_platform.is_cpu() or hasattr(platform, "_update_config"):
        return
    platform._update_config = platform.check_and_update_config

    def keep_async(config: Any) -> None:
        platform._update_config(config)
        config.scheduler_config.async_scheduling = True

    platform.check_and_update_config = staticmethod(keep_async)


def serve(llm: Any, requests: list[dict]) -> tuple[list[dict], int]:
    """Feed requests at the steps they name, step until all have ended, collect what came out.

    A request: ``prompt`` (token ids), ``params`` (of SamplingParams), ``at_step`` (default 0: at the
    start), ``after`` (index of a request that must have ended first), ``abort_at`` (step),
    ``reset_prefix_cache`` (whether the prefix cache is emptied before it), ``images`` (arguments
    of ``noise``, one list for each image token of the prompt), ``as_embeddings`` (whether the prompt
    is given as its tokens' embeddings), ``priority``.
    """
    engine = llm.llm_engine
    outputs: list[dict] = [
        {"token_ids": [], "finish_reason": None, "emitted": []} for _ in requests
    ]
    waiting = set(range(len(requests)))
    ended: set[int] = set()
    step = 0
    while len(ended) < len(requests):
        for i in sorted(waiting):
            request = requests[i]
            due = request.get("at_step", 0) <= step
            if "after" in request:
                due = due and request["after"] in ended
            if not due:
                continue
            waiting.discard(i)
            prompt = request["prompt"]
            if isinstance(prompt, dict):  # a turn that continues what another request said
                base = requests[prompt["of"]]["prompt"] + outputs[prompt["of"]]["token_ids"]
                prompt = base + prompt["then"]
                request["prompt"] = prompt
            if request.get("reset_prefix_cache"):
                assert engine.reset_prefix_cache()
            params = sampling_params(request["params"])
            inputs: dict[str, Any] = {"prompt_token_ids": prompt}
            if request.get("as_embeddings"):
                inputs = {"prompt_embeds": embeddings(llm)[prompt]}
            if "images" in request:
                inputs["multi_modal_data"] = {"image": [noise(*n) for n in request["images"]]}
            engine.add_request(str(i), inputs, params, priority=request.get("priority", 0))
        for i, request in enumerate(requests):
            if request.get("abort_at") == step and i not in ended and i not in waiting:
                engine.abort_request([str(i)])
                outputs[i]["finish_reason"] = "abort"
                ended.add(i)
        step += 1
        if not engine.has_unfinished_requests():
            continue
        for output in engine.step():
            i = int(output.request_id.split("-")[0])
            if i in ended:
                continue
            completion = output.outputs[0]
            # Tokens by step: the first entry is the prefill's, each later one a verification's.
            outputs[i]["emitted"].append(len(completion.token_ids) - len(outputs[i]["token_ids"]))
            outputs[i]["token_ids"] = list(completion.token_ids)
            outputs[i]["num_cached"] = output.num_cached_tokens
            if completion.logprobs:
                outputs[i]["logprobs"] = [
                    {str(t): lp.logprob for t, lp in position.items()}
                    for position in completion.logprobs
                ]
            if output.prompt_logprobs:
                outputs[i]["prompt_logprobs"] = [
                    position and {str(t): lp.logprob for t, lp in position.items()}
                    for position in output.prompt_logprobs
                ]
            if output.finished:
                outputs[i]["finish_reason"] = completion.finish_reason
                outputs[i]["stop_reason"] = completion.stop_reason
                outputs[i]["text"] = completion.text
                ended.add(i)
    return outputs, step


def embeddings(llm: Any) -> Any:
    """Of every token of the target's vocabulary, as its checkpoint has them."""
    from safetensors import safe_open

    with safe_open(f"{llm.model_config.model}/model.safetensors", "pt") as weights:
        return weights.get_tensor("model.embed_tokens.weight")


def noise(seed: int, height: int, width: int) -> Any:
    """An image of random pixels."""
    import numpy as np
    from PIL import Image

    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def sampling_params(options: dict) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    options = {"detokenize": False, **options}
    if "structured_outputs" in options:
        constraint = StructuredOutputsParams(**options["structured_outputs"])
        options["structured_outputs"] = constraint
    return SamplingParams(**options)


if __name__ == "__main__":
    main(*sys.argv[1:])
