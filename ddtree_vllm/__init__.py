# SPDX-License-Identifier: Apache-2.0
"""DDTree speculative decoding as a plugin for vLLM 0.32.0.

A DFlash drafter proposes a tree of tokens, the target verifies the whole tree in one forward pass,
and the accepted path is committed as if it had been decoded token by token.

Importing the package costs nothing: vLLM, torch and Triton are imported by the modules that need
them.
"""

__version__ = "0.1.0"

SUPPORTED_VLLM = "0.32.0"
"""The one vLLM release this plugin is written for; it refuses to load under any other."""
