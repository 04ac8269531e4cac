# SPDX-License-Identifier: Apache-2.0
"""A server that behaves like vLLM's where the health checks look, and misbehaves on request."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

METRICS = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{{engine="0",model_name="demo"}} {running}
vllm:num_requests_waiting{{engine="0",model_name="demo"}} {waiting}
# TYPE vllm:iteration_tokens_total histogram
vllm:iteration_tokens_total_bucket{{engine="0",le="+Inf",model_name="demo"}} {steps}
vllm:iteration_tokens_total_count{{engine="0",model_name="demo"}} {steps}
vllm:prompt_tokens_total{{engine="0",model_name="demo"}} {prompt}
vllm:generation_tokens_total{{engine="0",model_name="demo"}} {generated}
vllm:spec_decode_num_drafts_total{{engine="0",model_name="demo"}} {drafts}
vllm:spec_decode_num_draft_tokens_total{{engine="0",model_name="demo"}} {nodes}
vllm:spec_decode_num_accepted_tokens_total{{engine="0",model_name="demo"}} {accepted}
vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",position="0"}} {accepted}
vllm:request_success_total{{engine="0",finished_reason="length",model_name="demo"}} {finished}
vllm:request_success_total{{engine="0",finished_reason="stop",model_name="demo"}} 0.0
"""


class StubEngine:
    """Attributes set the behaviour, counters are what /metrics shows.

    busy: the engine makes a step at every look.
    hung: completions never end, counters rest.
    silent: nothing is answered at all.
    health: status of /health.
    health_delay_s: how late /health answers.
    """

    def __init__(self) -> None:
        self.busy = self.hung = self.silent = False
        self.health, self.health_delay_s = 200, 0.0
        self.text, self.status = " Paris, the", 200
        self.api_key = ""
        self.asked = 0
        names = "running waiting steps prompt generated drafts nodes accepted finished"
        self.counters = dict.fromkeys(names.split(), 0)
        self.closing = threading.Event()
        self.url = ""

    def step(self, *, drafts: int = 0, accepted: int = 0, generated: int = 1) -> None:
        self.counters["steps"] += 1
        self.counters["generated"] += generated
        self.counters["drafts"] += drafts
        self.counters["nodes"] += 31 * drafts
        self.counters["accepted"] += accepted

    def answer(self, path: str, body: dict, key: str) -> tuple[int, str]:
        if self.silent:
            self.closing.wait()
        if path == "/health":
            self.closing.wait(self.health_delay_s)
            return self.health, ""
        if path == "/metrics":
            if self.busy:
                self.step()
            return 200, METRICS.format(**self.counters)
        if self.api_key and key != f"Bearer {self.api_key}":
            return 401, '{"error": "Unauthorized"}'
        if path == "/v1/models":
            return 200, json.dumps({"data": [{"id": "demo"}]})
        assert path == "/v1/completions"
        self.asked += 1
        if self.hung or self.busy:
            self.closing.wait()
        if self.status != 200 or body["model"] != "demo":
            return (self.status if self.status != 200 else 404), '{"error": "no\nsuch model"}'
        self.step(generated=body["max_tokens"])
        return 200, json.dumps(
            {
                "choices": [{"text": self.text}],
                "usage": {"completion_tokens": body["max_tokens"] if self.text else 0},
            }
        )


@contextlib.contextmanager
def stub_engine() -> Iterator[StubEngine]:
    """A running stub; its `url` is set."""
    stub = StubEngine()

    class Handler(BaseHTTPRequestHandler):
        def _reply(self) -> None:
            length = int(self.headers.get("Content-Length", 0))
            body = json.loads(self.rfile.read(length) or b"{}")
            status, text = stub.answer(self.path, body, self.headers.get("Authorization", ""))
            data = text.encode()
            with contextlib.suppress(OSError):
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

        do_GET = do_POST = _reply

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    stub.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield stub
    finally:
        stub.closing.set()
        server.shutdown()
        server.server_close()
        thread.join(5)
