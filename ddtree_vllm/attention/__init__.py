# SPDX-License-Identifier: Apache-2.0
"""Tree attention over a paged key/value cache.

`tree_attention` is the whole of it. `tree_suffix_attention` is its second half, for engines whose
own kernel is the fastest over the prefix: it attends the rows of this step and merges.
"""

from ddtree_vllm.attention.store_kv import store_kv
from ddtree_vllm.attention.tiles import Tiles
from ddtree_vllm.attention.tree_attention import tree_attention, tree_suffix_attention

__all__ = ["Tiles", "store_kv", "tree_attention", "tree_suffix_attention"]
