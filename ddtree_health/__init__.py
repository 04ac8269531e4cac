# SPDX-License-Identifier: Apache-2.0
"""Is an engine alive, ready, generating, drafting, and are its GPUs well?

Runs on any Python from 3.9 and imports nothing but the standard library, because hosts have nothing
else. vLLM's own `/health` answers 200 while the engine hangs, and late while it is merely busy, so
liveness is judged by progress: `live.judge` compares the engine's counters between two looks.
`server` and `unit` look, `live`, `generates`, `drafts` and `gpu` judge, `report` says it to people,
programs and Prometheus, `alerts` tells of failures that last, `waiting` serves the start of an
engine. `cli` is the entry point.
"""
