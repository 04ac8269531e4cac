# SPDX-License-Identifier: Apache-2.0
"""What GPU tests do in the process of an engine, where its memory and its host thread are.

Started through `harness.Job.driver`; the model runs in the same process.
"""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def decode_without_waiting(llm: Any, requests: list[dict[str, Any]], steps: int) -> dict[str, Any]:
    """Decodes with all requests in the batch; torch raises where the host waits for the device.

    Torch checks calls that wait by themselves: copies to the host, `item`, `nonzero`, waiting for a
    stream. The wait that remains is not one of them: for a step's tokens vLLM waits for the event
    behind their copy, on another stream, while the next step is already running.
    """
    engine = llm.llm_engine
    tokens = add_requests(engine, requests)
    while not all(tokens.values()):
        count_tokens(engine.step(), tokens)
    for _ in range(3):
        count_tokens(engine.step(), tokens)
    before = sum(tokens.values())
    with raising_where_the_host_waits() as checked:
        for _ in range(steps):
            count_tokens(engine.step(), tokens)
    return {
        "checked": checked,
        "running": engine.get_num_unfinished_requests(),
        "tokens": sum(tokens.values()) - before,
    }


@contextlib.contextmanager
def raising_where_the_host_waits() -> Iterator[bool]:
    """Yields whether anything is checked: there is nothing to wait for without a GPU."""
    import torch

    if not torch.cuda.is_available():
        yield False
        return
    value = torch.ones(1, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        with contextlib.suppress(RuntimeError):
            value.item()
            raise AssertionError("torch does not notice that the host waits for a value")
        yield True
    finally:
        torch.cuda.set_sync_debug_mode("default")


def add_requests(engine: Any, requests: list[dict[str, Any]]) -> dict[str, int]:
    """Adds all of them; returns the tokens each has got, by name."""
    for i, request in enumerate(requests):
        add_request(engine, str(i), request)
    return {str(i): 0 for i in range(len(requests))}


def add_request(engine: Any, name: str, request: dict[str, Any]) -> None:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    params = SamplingParams(
        **request["params"], detokenize=False, output_kind=RequestOutputKind.DELTA
    )
    engine.add_request(name, {"prompt_token_ids": request["prompt"]}, params)


def count_tokens(outputs: list[Any], tokens: dict[str, int]) -> None:
    for output in outputs:
        tokens[output.request_id.split("-")[0]] += len(output.outputs[0].token_ids)


def soak(llm: Any, pool: list[dict[str, Any]], steps: int, seats: int) -> dict[str, Any]:
    """Serves the requests of ``pool`` over and over for ``steps`` steps, some of them aborted.

    How many run at a time changes every 100 steps, so that requests join and leave a batch of any
    size. Returns each ended request as [number, tokens, verifications, finish reason], and samples
    of memory as [step, allocated, reserved, resident].
    """
    engine = llm.llm_engine
    rng = random.Random(0)
    running: dict[str, list[int]] = {}
    ended: list[list[Any]] = []
    aborted = 0
    memory = []
    number = 0
    wanted = seats
    for step in range(steps):
        if step % 100 == 0:
            wanted = rng.randint(1, seats)
        while len(running) < wanted:
            add_request(engine, str(number), pool[number % len(pool)])
            running[str(number)] = [0, -1]  # the first tokens come of the prompt
            number += 1
        for output in engine.step():
            name = output.request_id.split("-")[0]
            if name not in running:
                continue
            counts = running[name]
            counts[0] += len(output.outputs[0].token_ids)
            counts[1] += 1
            if output.finished:
                del running[name]
                ended.append([int(name), *counts, output.outputs[0].finish_reason])
        if step % 300 == 150 and running:
            name = rng.choice(sorted(running))
            engine.abort_request([name])
            del running[name]
            aborted += 1
        if step % 10 == 0:
            memory.append([step, *memory_in_use()])
    left = len(running)
    engine.abort_request(list(running))
    while engine.has_unfinished_requests():
        engine.step()
    return {"ended": ended, "aborted": aborted, "memory": memory, "left": left, "begun": number}


def memory_in_use() -> tuple[int, int, int]:
    """Bytes: tensors on the GPU, what torch holds of the GPU for them, this process in RAM."""
    import torch

    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    if not torch.cuda.is_available():
        return 0, 0, resident
    return torch.cuda.memory_allocated(), torch.cuda.memory_reserved(), resident


def compiled_while_serving(llm: Any, requests: list[dict[str, Any]]) -> dict[str, Any]:
    """Names of the Triton kernels, with their modules, that serving compiles or loads.

    ``noticed``: whether one that was never launched before is among those noted after serving.
    """
    import torch
    from engine_process import serve
    from never_launched import never_launched
    from triton import knobs

    compiled: list[str] = []
    before = knobs.runtime.jit_post_compile_hook

    def note(**event: Any) -> Any:
        compiled.append(f"{event['fn'].module}.{event['fn'].name}")
        return None if before is None else before(**event)

    knobs.runtime.jit_post_compile_hook = note
    outputs, steps = serve(llm, requests)
    while_serving = list(compiled)
    if torch.cuda.is_available():
        never_launched[(1,)](torch.zeros(1, device="cuda"))
    return {
        "compiled": while_serving,
        "noticed": any(name.endswith(".never_launched") for name in compiled),
        "steps": steps,
        "tokens": [o["token_ids"] for o in outputs],
    }
