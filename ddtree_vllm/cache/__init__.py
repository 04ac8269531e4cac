# SPDX-License-Identifier: Apache-2.0
"""After the walk: the accepted path becomes an ordinary, linear prefix of the step's rows.

`compact_accepted_kv` moves its keys and values, `linearise_rows` its hidden states. Downstream
nothing knows that there was a tree.
"""

from ddtree_vllm.cache.compact import KVCacheTable, compact_accepted_kv
from ddtree_vllm.cache.linearise import linearise_rows

__all__ = ["KVCacheTable", "compact_accepted_kv", "linearise_rows"]
