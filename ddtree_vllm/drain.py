# SPDX-License-Identifier: Apache-2.0
"""What a client sees of a server that drains.

On SIGTERM vLLM finishes the requests in flight for `--shutdown-timeout` seconds and goes on accepting
connections. A request that comes then fails inside: vLLM 0.32 has shut its renderer down and answers
status 500 with a traceback in the log, or, if the request got as far as the engine, gives a stream that
ends after its first event with finish reason "abort". Neither tells a client or a load balancer to ask
another server. `DrainMiddleware`, which `ddtree-vllm serve` adds, answers status 503 instead.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

PATH = f"{__name__}.DrainMiddleware"
"""What vLLM's option --middleware calls it."""

SETTLE_SECONDS = 1.0
"""From turning new requests away to telling the engine: those already accepted reach it first."""

RETRY_AFTER_SECONDS = 10

REASON = "This server is shutting down and finishes the requests it has; send this one again."


class DrainMiddleware:
    """ASGI middleware: status 503 with `Retry-After` for what asks for work during a drain.

    Requests that read (GET, HEAD, OPTIONS: health, metrics, models) are answered as ever, and requests
    in flight are left alone. An accepted request that the drain overtook before its answer began, a
    500 of vLLM's, becomes the same 503.
    """

    def __init__(self, app: Callable[[Scope, Receive, Send], Awaitable[None]]) -> None:
        self.app = app
        self.draining = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            self._watch(scope["app"].state)
        elif scope["type"] == "http" and scope["method"] not in ("GET", "HEAD", "OPTIONS"):
            if self.draining:
                await _read_body(receive)
                await _turn_away(send)
            else:
                await self._pass_on(scope, receive, send)
            return
        await self.app(scope, receive, send)

    def _watch(self, state: Any) -> None:
        """vLLM's server calls the client's `shutdown` on SIGTERM, in a thread of its own."""
        engine_client = getattr(state, "engine_client", None)
        if engine_client is None:
            return  # a server without an engine, such as vLLM's renderer
        shut_down = engine_client.shutdown
        loop = asyncio.get_running_loop()

        def shutdown(timeout: float | None = None) -> None:
            if self.draining:
                return shut_down(timeout=timeout)  # once more, at the end of the program
            self.draining = True
            if timeout:
                time.sleep(SETTLE_SECONDS)
            shut_down(timeout=timeout)
            # vLLM then looks through every process of the host before it closes the port. Who came
            # meanwhile was connected, and would find the connection reset instead of refused.
            loop.call_soon_threadsafe(_stop_listening, getattr(state, "server", None))

        engine_client.shutdown = shutdown

    async def _pass_on(self, scope: Scope, receive: Receive, send: Send) -> None:
        turned_away = False

        async def send_unless_overtaken(message: Message) -> None:
            nonlocal turned_away
            overtaken = message["type"] == "http.response.start" and message["status"] == 500
            if self.draining and overtaken:
                turned_away = True
                await _turn_away(send)
            elif not turned_away:
                await send(message)

        await self.app(scope, receive, send_unless_overtaken)


def _stop_listening(server: Any) -> None:
    """Closes what a uvicorn server listens on; connections that it has stay."""
    for listening in getattr(server, "servers", ()):
        listening.close()


async def _read_body(receive: Receive) -> None:
    """To its end: a connection closed with something unread is reset, and its answer may be lost."""
    while True:
        message = await receive()
        if message["type"] != "http.request" or not message.get("more_body", False):
            return


async def _turn_away(send: Send) -> None:
    error = {"message": REASON, "type": "ServiceUnavailableError", "param": None, "code": 503}
    body = json.dumps({"error": error}).encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"retry-after", str(RETRY_AFTER_SECONDS).encode()),
        # A balancer that keeps this connection would send the next request here too.
        (b"connection", b"close"),
    ]
    await send({"type": "http.response.start", "status": 503, "headers": headers})
    await send({"type": "http.response.body", "body": body})
