# SPDX-License-Identifier: Apache-2.0
"""What verification leaves for the commit: a few vectors per row instead of a state per row."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ddtree_vllm.gdn.launch import num_factors


@dataclass(frozen=True)
class Stash:
    """Vectors of the rows under verification, for all Gated DeltaNet layers of a model.

    Sized by the tree rows of a step, not by requests times budget: row i of the stash is row i of
    the step's trees laid end to end (`TreeRows.stash_start`). Overwritten every step; holds nothing
    that outlives the step's commit.

    `k` stays as the convolution gave it, in the activations' type, which loses nothing; its L2 norm
    is folded into `u`, so that k_j u_j^T of the recurrence is `k[j] u[j]^T` here.

    Attributes (L layers, T rows, Hk key heads, Hv value heads, C = 2 Hk K + Hv V conv channels):
        k: [L, T, Hk, K], activations' type.
        u: [L, T, Hv, V], float32, u / |k|.
        log_decay: [L, T, Hv], float64, sum of the log-decay along the row's path. In float64
            because the commit needs differences of it: after a strong decay the weak ones would
            drown.
        conv: [L, T, C], activations' type, raw rows before the convolution.
        factors: float32, flat: what the two kernels of a layer's verification pass between them.
            The layers take turns with it.
    """

    k: torch.Tensor
    u: torch.Tensor
    log_decay: torch.Tensor
    conv: torch.Tensor
    factors: torch.Tensor

    @classmethod
    def allocate(
        cls,
        num_layers: int,
        max_rows: int,
        num_k_heads: int,
        num_v_heads: int,
        head_k_dim: int,
        head_v_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
        *,
        max_reqs: int,
        max_num_rows: int,
    ) -> Stash:
        """Allocates a stash.

        Args:
            max_rows: the most tree rows a step can hold, over all its requests.
            max_reqs: the most requests with a tree that a step can hold.
            max_num_rows: the most rows of one of them.
            dtype: type of the activations.
        """
        channels = 2 * num_k_heads * head_k_dim + num_v_heads * head_v_dim
        rows = (num_layers, max_rows)

        def empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.empty(rows + shape, dtype=dtype, device=device)

        return cls(
            k=empty(num_k_heads, head_k_dim, dtype=dtype),
            u=empty(num_v_heads, head_v_dim, dtype=torch.float32),
            log_decay=empty(num_v_heads, dtype=torch.float64),
            conv=empty(channels, dtype=dtype),
            factors=torch.empty(
                num_factors(max_reqs, max_num_rows, num_v_heads), dtype=torch.float32, device=device
            ),
        )

    @staticmethod
    def bytes_per_row(
        num_layers: int,
        num_k_heads: int,
        num_v_heads: int,
        head_k_dim: int,
        head_v_dim: int,
        dtype: torch.dtype,
    ) -> int:
        """Device memory that one row takes over all layers, in bytes, for sizing beforehand.

        The factors come on top, 4 bytes each: `launch.num_factors`.
        """
        key_dim, value_dim = num_k_heads * head_k_dim, num_v_heads * head_v_dim
        activations = (key_dim + 2 * key_dim + value_dim) * dtype.itemsize
        return num_layers * (activations + value_dim * 4 + num_v_heads * 8)

    @property
    def num_layers(self) -> int:
        return self.k.shape[0]

    @property
    def max_rows(self) -> int:
        return self.k.shape[1]

    def bytes(self) -> int:
        """Device memory of the buffers, in bytes."""
        rows = self.k.nbytes + self.u.nbytes + self.log_decay.nbytes + self.conv.nbytes
        return rows + self.factors.nbytes
