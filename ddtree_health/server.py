# SPDX-License-Identifier: Apache-2.0
"""The server's HTTP interface: every answer, and every way of not answering."""

from __future__ import annotations

import http.client
import json
import threading
import time
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from . import prometheus
from .errors import HealthError

# Any of these moves when the engine makes a step or ends a request.
PROGRESS = (
    "vllm:iteration_tokens_total_count",
    "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total",
    "vllm:spec_decode_num_drafts_total",
    "vllm:request_success_total",
    "vllm:num_preemptions_total",
)
STEPS = PROGRESS[0]
GENERATED = PROGRESS[2]
DRAFTS = PROGRESS[3]
ACCEPTED = "vllm:spec_decode_num_accepted_tokens_total"
RUNNING = "vllm:num_requests_running"
WAITING = "vllm:num_requests_waiting"


@dataclass(frozen=True)
class Answer:
    """Attributes:
    status: HTTP status, 0 if there was no answer.
    body: the body, or why there was none.
    seconds: how long it took.
    refused: nothing listens on the port.
    """

    status: int
    body: str
    seconds: float
    refused: bool = False

    @property
    def silent(self) -> bool:
        return self.status == 0


@dataclass(frozen=True)
class Sample:
    """What /metrics said at one moment.

    Attributes:
        at: monotonic seconds.
        metrics: value by name, None if /metrics did not answer.
        silence: why it did not.
    """

    at: float
    metrics: dict[str, float] | None
    silence: str = ""

    @property
    def counters(self) -> dict[str, float] | None:
        """The counters of progress, None if unknown."""
        if self.metrics is None:
            return None
        return {name: self.metrics[name] for name in PROGRESS if name in self.metrics}

    def value(self, name: str) -> float:
        return (self.metrics or {}).get(name, 0.0)

    @property
    def work(self) -> int:
        """Requests that the engine holds."""
        return int(self.value(RUNNING) + self.value(WAITING))


class Server:
    """One server.

    Args:
        url: such as http://127.0.0.1:8000.
        timeout_s: limit of a look at /health, /metrics and /v1/models.
        api_key: sent as a bearer token if not empty.

    Raises:
        HealthError: the URL is not one.
    """

    def __init__(self, url: str, timeout_s: float = 10.0, api_key: str = "") -> None:
        try:
            parts = urlsplit(url)
            port = parts.port or (443 if parts.scheme == "https" else 80)
        except ValueError as error:
            raise HealthError(f"{url} is no URL: {error}") from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise HealthError(f"{url} is no HTTP URL, such as http://127.0.0.1:8000")
        self.url = url.rstrip("/")
        self.timeout_s = timeout_s
        self._secure = parts.scheme == "https"
        self._host, self._port, self._prefix = parts.hostname, port, parts.path.rstrip("/")
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}

    def get(self, path: str) -> Answer:
        return self._request("GET", path, None, self.timeout_s)

    def post(self, path: str, body: dict[str, Any], timeout_s: float) -> Answer:
        return self._request("POST", path, body, timeout_s)

    def sample(self) -> Sample:
        answer = self.get("/metrics")
        now = time.monotonic()
        if answer.status != 200:
            why = answer.body if answer.silent else f"/metrics answered {answer.status}"
            return Sample(now, None, why)
        metrics = prometheus.parse(answer.body)
        if not any(name in metrics for name in (*PROGRESS, RUNNING)):
            return Sample(now, None, "/metrics holds no metric of vLLM")
        return Sample(now, metrics)

    def models(self) -> list[str]:
        """Names that the server serves; none if it does not say."""
        answer = self.get("/v1/models")
        if answer.status != 200:
            return []
        try:
            return [str(model["id"]) for model in json.loads(answer.body)["data"]]
        except (ValueError, KeyError, TypeError):
            return []

    def _request(
        self, method: str, path: str, body: dict[str, Any] | None, timeout_s: float
    ) -> Answer:
        """An answer within `timeout_s` as a whole, however slowly the bytes come."""
        began = time.monotonic()
        box: list[Answer] = []
        kind = http.client.HTTPSConnection if self._secure else http.client.HTTPConnection
        connection = kind(self._host, self._port, timeout=timeout_s)

        def talk() -> None:
            try:
                headers = dict(self._headers)
                if body is not None:
                    headers["Content-Type"] = "application/json"
                connection.request(
                    method,
                    self._prefix + path,
                    None if body is None else json.dumps(body),
                    headers,
                )
                response = connection.getresponse()
                text = response.read().decode("utf-8", "replace")
                box.append(Answer(response.status, text, time.monotonic() - began))
            except ConnectionRefusedError:
                why = f"nothing listens on port {self._port}"
                box.append(Answer(0, why, time.monotonic() - began, refused=True))
            except (OSError, http.client.HTTPException) as error:
                if "timed out" in str(error):
                    return
                why = f"{path} broke off: {error or type(error).__name__}"
                box.append(Answer(0, why, time.monotonic() - began))

        # A daemon: the socket's own limit starts anew with every byte, this one does not.
        thread = threading.Thread(target=talk, daemon=True)
        thread.start()
        thread.join(timeout_s)
        if box:
            return box[0]
        connection.close()
        return Answer(0, f"{path} did not answer within {timeout_s:g} s", time.monotonic() - began)
