# SPDX-License-Identifier: Apache-2.0
"""Whether this process serves with the plugin's worker, or the plugin is merely installed."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def is_active(vllm_config: VllmConfig | None) -> bool:
    """True where one of our workers was asked for, with speculation or without.

    Kernels that also serve runs without speculation (attention and recurrent layers on a CPU) go by
    this, so that both runs share them; an engine with another worker is left to vLLM.
    """
    if vllm_config is None:
        return False
    worker = vllm_config.parallel_config.worker_cls
    name = worker if isinstance(worker, str) else f"{worker.__module__}.{worker.__qualname__}"
    return name.startswith("ddtree_vllm.")
