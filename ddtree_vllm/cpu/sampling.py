# SPDX-License-Identifier: Apache-2.0
"""Lets a request with top-k or top-p be sampled where kernels are interpreted."""

from __future__ import annotations


def use_torch_top_k_top_p() -> None:
    """Choose vLLM's PyTorch form of top-k and top-p, as it does itself where there is no Triton.

    Its Triton kernel counts rows with Python's integers when interpreted, and asks one of them for
    its type: the engine would end with the first such request.
    """
    from vllm.v1.sample.ops import topk_topp_sampler

    topk_topp_sampler.HAS_TRITON = False
