# SPDX-License-Identifier: Apache-2.0
"""What both attention backends share: how a step's trees reach a layer, and how its cache is read."""

from __future__ import annotations

import torch

# The attribute of a layer's attention metadata under which the target's step carries its tree rows.
# The drafter builds its metadata elsewhere, so its presence means: these are target rows.
TREE_ATTRIBUTE = "ddtree"


class KeyValueViews:
    """What cache compaction needs to know of an attention layer."""

    head_size: int

    def key_value_views(self, kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Key and value ``[num_blocks, block_size, Hkv, D]`` of a ``[B, Hkv, block, 2 D]`` cache."""
        key, value = kv_cache.transpose(1, 2).split(self.head_size, dim=-1)
        return key, value
