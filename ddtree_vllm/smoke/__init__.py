# SPDX-License-Identifier: Apache-2.0
"""The smoke test: three servers, the same prompts, every token compared.

Starts `ddtree-vllm serve` as a user would, for no speculation, a chain and a tree, sends the same
prompts through the `openai` client, and compares token ids and text: greedy, and sampled with a
seed. Prints a table, writes build/smoke.json, and exits non-zero when anything differs.

    python -m ddtree_vllm.smoke --target demo/target --drafter demo/drafter --budget 31

`--server image` takes the three servers from a container image instead. `--server URL` asks a server
that runs already: see remote.py.
"""
