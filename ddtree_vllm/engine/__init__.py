# SPDX-License-Identifier: Apache-2.0
"""The subclasses of vLLM that run one decode step as draft, verify, walk, commit.

This package, the backends in ``attention/``, ``gdn/layer.py`` and ``plugin.py`` are the only places
that import vLLM: when a later vLLM moves a hook, one file here changes.
"""
