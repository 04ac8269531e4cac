# SPDX-License-Identifier: Apache-2.0
"""The two products that read a Gated DeltaNet layer's input, as one.

vLLM multiplies by the weights of q, k, v and z, and apart from that by those of the gates b and a: 96
columns beside 16,384 on Qwen3.6-27B, which take a split product and its reduction, 8 µs a layer at 256
rows on an H200 (docs/benchmarks). Beside the others they are part of a tile that is there anyway.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod

COLUMNS = 64
"""The product's width is a multiple of it, so that a row of bfloat16 begins on 128 bytes."""


def share_weight(parts: Sequence[LinearBase]) -> torch.Tensor | None:
    """One weight, of which those of the parts become views: loading them stays vLLM's affair.

    Args:
        parts: plain linear layers of one input size; each ``weight`` is ``[columns, H]``.

    Returns:
        ``[sum of columns, rounded up, H]``, zeros in the rows that are nobody's; None where a part is
        quantised, and nothing is changed.
    """
    if not all(isinstance(part.quant_method, UnquantizedLinearMethod) for part in parts):
        return None
    weights = [part.weight for part in parts]
    used = sum(weight.shape[0] for weight in weights)
    shared = weights[0].new_zeros(-(-used // COLUMNS) * COLUMNS, weights[0].shape[1])
    start = 0
    for weight in weights:
        view = shared[start : start + weight.shape[0]]
        weight.data = view.copy_(weight.data)
        start += weight.shape[0]
    return shared
