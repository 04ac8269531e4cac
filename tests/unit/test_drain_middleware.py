# SPDX-License-Identifier: Apache-2.0
"""The middleware in a real ASGI application; the engine client is a stand-in. The real server drains
in tests/engine/test_drain.py."""

import asyncio
from types import SimpleNamespace

import pytest
from starlette.applications import Starlette
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.testclient import TestClient

from ddtree_vllm import drain


class StandInEngineClient:
    def __init__(self):
        self.stops = []

    def shutdown(self, timeout=None):
        self.stops.append(timeout)


class StandInListener:
    closed = False

    def close(self):
        self.closed = True


@pytest.fixture
def waited(monkeypatch):
    seconds = []
    monkeypatch.setattr(drain.time, "sleep", seconds.append)
    return seconds


@pytest.fixture
def client(waited):
    async def chat(request):
        wanted = await request.json()
        if "stop while it runs" in wanted:
            request.app.state.engine_client.shutdown(timeout=60)
        return JSONResponse({"said": "hello"}, wanted["status"])

    async def health(request):
        return Response(status_code=200)

    app = Starlette(
        routes=[Route("/chat", chat, methods=["POST"]), Route("/health", health)],
    )
    app.state.engine_client = StandInEngineClient()
    app.add_middleware(drain.DrainMiddleware)
    with TestClient(app, raise_server_exceptions=False) as testing:
        testing.engine = app.state.engine_client
        yield testing


def chat(client, **body):
    return client.post("/chat", json={"status": 200, **body})


def is_turned_away(answer):
    error = answer.json()["error"]
    assert error == {
        "message": drain.REASON,
        "type": "ServiceUnavailableError",
        "param": None,
        "code": 503,
    }
    assert answer.headers["retry-after"] == "10"
    assert answer.headers["connection"] == "close"
    return answer.status_code == 503


@pytest.mark.parametrize("status", [200, 400, 500])
def test_a_server_that_does_not_drain_answers_as_it_would_alone(client, status):
    answer = chat(client, status=status)
    assert (answer.status_code, answer.json()) == (status, {"said": "hello"})
    assert "retry-after" not in answer.headers


def test_new_work_is_turned_away_during_a_drain(client):
    client.engine.shutdown(timeout=60)
    assert is_turned_away(chat(client))


def test_a_request_is_read_to_its_end_before_it_is_turned_away():
    """Its sender would find the connection reset, and might never see the answer."""
    parts = [
        {"type": "http.request", "body": b"{", "more_body": True},
        {"type": "http.request", "body": b"}", "more_body": False},
    ]
    sent = []

    async def receive():
        return parts.pop(0)

    async def send(message):
        assert parts == [], "answered before the end"
        sent.append(message["type"])

    middleware = drain.DrainMiddleware(app=None)
    middleware.draining = True
    asyncio.run(middleware({"type": "http", "method": "POST"}, receive, send))
    assert sent == ["http.response.start", "http.response.body"]


def test_a_client_that_left_is_not_waited_for():
    async def receive():
        return {"type": "http.disconnect"}

    async def send(message):
        pass

    middleware = drain.DrainMiddleware(app=None)
    middleware.draining = True
    asyncio.run(middleware({"type": "http", "method": "POST"}, receive, send))


def test_what_only_reads_is_answered_during_a_drain(client):
    client.engine.shutdown(timeout=60)
    assert client.get("/health").status_code == 200


def test_a_request_in_flight_finishes(client):
    answer = chat(client, **{"stop while it runs": True})
    assert (answer.status_code, answer.json()) == (200, {"said": "hello"})


def test_a_request_that_the_drain_overtakes_is_turned_away_and_not_told_of_an_error(client):
    assert is_turned_away(chat(client, status=500, **{"stop while it runs": True}))


def test_a_refusal_during_a_drain_keeps_its_reason(client):
    answer = chat(client, status=400, **{"stop while it runs": True})
    assert (answer.status_code, answer.json()) == (400, {"said": "hello"})


def test_the_engine_is_told_to_stop_with_the_servers_own_timeout(client, waited):
    client.engine.shutdown(timeout=60)
    assert client.engine.stops == [60]
    assert waited == [drain.SETTLE_SECONDS]


@pytest.mark.parametrize("timeout", [0, None])
def test_a_stop_that_aborts_does_not_wait_for_requests(client, waited, timeout):
    client.engine.shutdown(timeout=timeout)
    assert client.engine.stops == [timeout]
    assert waited == []


def test_a_second_stop_waits_no_more(client, waited):
    """vLLM's program stops the engine once more when it ends."""
    client.engine.shutdown(timeout=60)
    client.engine.shutdown(timeout=60)
    assert client.engine.stops == [60, 60]
    assert len(waited) == 1


def test_nobody_is_connected_once_the_engine_has_stopped(client):
    """Until vLLM closes the port itself, the kernel would connect who comes, and then reset them."""
    listening = StandInListener()
    client.app.state.server = SimpleNamespace(servers=[listening])
    client.engine.shutdown(timeout=60)
    client.get("/health")  # the event loop has had a turn
    assert listening.closed


def test_a_server_without_an_engine_starts():
    """vLLM's server that only renders prompts has no engine client."""

    async def health(request):
        return Response(status_code=200)

    app = Starlette(routes=[Route("/health", health)])
    app.add_middleware(drain.DrainMiddleware)
    with TestClient(app) as testing:
        assert testing.get("/health").status_code == 200
