# SPDX-License-Identifier: Apache-2.0
"""Lets engine and worker talk in a container whose /dev/shm has Docker's usual 64 MB."""

from __future__ import annotations

from typing import Any

# Ten chunks a queue, two queues. What is larger than a chunk goes through a socket, as vLLM does it.
CHUNK_BYTES = 2 << 20


def fit_message_queues() -> None:
    """Makes vLLM's two queues of 160 and 240 MiB as small as one worker's messages are.

    Without a GPU vLLM gives even a single worker a process of its own, and refuses to start where
    /dev/shm cannot hold both queues. One of the two sizes is an environment variable, the other none.
    """
    from vllm.v1.executor import multiproc_executor

    if issubclass(multiproc_executor.MessageQueue, _Fitted):
        return

    class FittedMessageQueue(_Fitted, multiproc_executor.MessageQueue):  # type: ignore[name-defined, misc]
        pass

    multiproc_executor.MessageQueue = FittedMessageQueue


class _Fitted:
    def __init__(self, *args: Any, max_chunk_bytes: int = CHUNK_BYTES, **kwargs: Any) -> None:
        chunk = min(max_chunk_bytes, CHUNK_BYTES)
        super().__init__(*args, max_chunk_bytes=chunk, **kwargs)  # type: ignore[call-arg]
