# SPDX-License-Identifier: Apache-2.0
"""Which kernels an engine would compile, seen without compiling: what its launches differ in.

Runs in the engine's processes (`harness.Job.driver`). Triton compiles a kernel anew for every
combination of compile-time values, types, and what it specialises on: whether a number is 1 or
divisible by 16, whether an address is divisible by 16.
"""

from __future__ import annotations

import importlib
from typing import Any

# On a GPU other kernels serve these rows (FlashAttention, vLLM's prefill), or a launch has no
# counterpart there: the CPU's attention layers run our kernel over prompts of any length.
CPU_ONLY = {
    "_tree_attention_kernel",
    "_merge_splits_kernel",
    "_store_kv_kernel",
    "_causal_conv_kernel",
    "_sequence_kernel",
}


def warm_up_then_serve(llm: Any, requests: list[dict]) -> dict[str, Any]:
    """Launches of the warm-ups, of ours alone, and of serving after them; and what was served."""
    from engine_process import serve

    llm.collective_rpc(record_launches)
    llm.collective_rpc(run_vllm_warm_up)
    stock = llm.collective_rpc(take_launches)[0]
    llm.collective_rpc(run_our_warm_up)
    ours = llm.collective_rpc(take_launches)[0]
    outputs, steps = serve(llm, requests)
    return {
        "stock": stock,
        "ours": ours,
        "served": llm.collective_rpc(take_launches)[0],
        "tokens": [output["token_ids"] for output in outputs],
        "steps": steps,
    }


def record_launches(worker: Any) -> None:
    """From here on, and with the tiles that a GPU would get."""
    from triton.runtime.interpreter import InterpretedFunction

    for name in (
        "gdn.launch.interpreting",
        "gdn.conv.interpreting",
        "gdn.recurrent.interpreting",
        "gdn.launch.overlapping",
        "gdn.conv.overlapping",
        "gdn.verify.overlapping",
        "gdn.launch.shared_memory_per_block",
        "tree.builder.requests_per_program",
        "sampling.walk.requests_per_program",
        "tree.candidates.INTERPRETED",
    ):
        module, attribute = f"ddtree_vllm.{name}".rsplit(".", 1)
        on_gpu: Any = (lambda *_: 1) if attribute == "requests_per_program" else (lambda: False)
        if attribute == "INTERPRETED":
            on_gpu = False
        if attribute == "shared_memory_per_block":
            on_gpu = lambda: 227 * 1024  # noqa: E731
        found = importlib.import_module(module)
        getattr(found, attribute)  # a name that is gone would leave the CPU's tiles in place
        setattr(found, attribute, on_gpu)
    worker.launches = set()
    run = InterpretedFunction.run

    def run_and_record(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        if self.fn.__module__.startswith("ddtree_vllm."):
            worker.launches.add(variant(self, args, kwargs))
        return run(self, *args, grid=grid, warmup=warmup, **kwargs)

    InterpretedFunction.run = run_and_record


def variant(kernel: Any, args: tuple, kwargs: dict[str, Any]) -> str:
    """The kernel's name and everything that Triton would compile it anew for."""
    given = dict(zip(kernel.arg_names, args, strict=False)) | kwargs
    plain = kernel.kwargs.get("do_not_specialize") or ()
    annotations = kernel.fn.__annotations__
    parts = []
    for name, value in given.items():
        if "constexpr" in str(annotations.get(name)) or name not in kernel.arg_names:
            parts.append(f"{name}={value}")
        else:
            parts.append(f"{name}:{specialised(value, name in plain)}")
    return f"{kernel.fn.__name__}({', '.join(sorted(parts))})"


def specialised(value: Any, plain: bool) -> str:
    import torch

    if isinstance(value, torch.Tensor):
        aligned = "" if plain or value.data_ptr() % 16 else " aligned"
        return f"{value.dtype}{aligned}"
    if isinstance(value, tuple):
        return str([specialised(item, plain) for item in value])
    if isinstance(value, bool) or not isinstance(value, int):
        return type(value).__name__ if value is not None else "None"
    if plain:
        return "int"
    return "one" if value == 1 else "int by 16" if value % 16 == 0 else "int"


def run_vllm_warm_up(worker: Any) -> None:
    # The end of it zeroes the null block and waits for the device: neither is there on a CPU.
    import torch
    from vllm.v1.worker.gpu.warmup import warmup_kernels

    torch.accelerator.synchronize = lambda: None
    warmup_kernels(worker.model_runner, worker.execute_model, worker.sample_tokens)


def run_our_warm_up(worker: Any) -> None:
    from ddtree_vllm.engine.warm_up import warm_up_mixed_batches

    warm_up_mixed_batches(worker.model_runner, worker.execute_model, worker.sample_tokens)


def take_launches(worker: Any) -> list[str]:
    found = sorted(worker.launches)
    worker.launches.clear()
    return found
