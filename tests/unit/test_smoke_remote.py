# SPDX-License-Identifier: Apache-2.0
"""The smoke test of a server that runs already, and of an image.

A stand-in for the server answers over HTTP, one for Docker keeps what it was called with.
"""

import http.server
import json
import subprocess
import sys
import threading
from typing import ClassVar

import pytest

from ddtree_vllm.smoke import __main__ as smoke
from ddtree_vllm.smoke import container, remote
from ddtree_vllm.smoke.server import ServerError


class StandIn(http.server.BaseHTTPRequestHandler):
    """Behaves as its class attribute says; two drafts and four accepted tokens a completion."""

    behaviour = ""
    drafts = 0
    keys: ClassVar[set] = set()

    def log_message(self, *args):
        pass

    def answer(self, text, status=200):
        self.send_response(status)
        self.end_headers()
        self.wfile.write(text.encode())

    def do_GET(self):
        self.keys.add(self.headers["Authorization"])
        if self.path == "/v1/models":
            return self.answer(json.dumps({"data": [{"id": "m"}]}))
        accepted = 0 if self.behaviour == "rejects all" else 2 * type(self).drafts
        return self.answer(
            f'vllm:spec_decode_num_drafts_total{{engine="0"}} {type(self).drafts}\n'
            f'vllm:spec_decode_num_accepted_tokens_total{{engine="0"}} {accepted}\n'
        )

    def do_POST(self):
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert request["temperature"] == 0
        if self.behaviour != "drafts nothing":
            type(self).drafts += 2
        if request.get("stream"):
            return self.stream()
        text = request["prompt"].upper()
        if self.behaviour == "batch changes tokens" and type(self).drafts > 6:
            text += "!"
        if self.behaviour == "engine died":
            return self.answer("engine is dead", 500)
        usage = {"completion_tokens": 0 if self.behaviour == "generates nothing" else 5}
        return self.answer(json.dumps({"choices": [{"text": text}], "usage": usage}))

    def stream(self):
        events = [{"delta": {"role": "assistant", "content": ""}}, {"delta": {"content": "he"}}]
        if self.behaviour != "cuts the stream":
            events.append({"delta": {"content": "llo"}, "finish_reason": "stop"})
        lines = [f"data: {json.dumps({'choices': [event]})}\n\n" for event in events]
        if self.behaviour == "error in the stream":
            lines[1:] = ['data: {"error": {"message": "aborted"}}\n\n']
        if self.behaviour != "cuts the stream":
            lines.append("data: [DONE]\n\n")
        self.answer("".join(lines))


@pytest.fixture
def serve():
    """Starts a stand-in that behaves in a way; returns its URL."""
    servers = []

    def start(behaviour=""):
        handler = type("Handler", (StandIn,), {"behaviour": behaviour, "drafts": 0, "keys": set()})
        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        servers.append(server)
        return f"http://127.0.0.1:{server.server_port}", handler

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def test_a_server_that_answers_passes_and_is_reported(serve, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    url, handler = serve()
    code = smoke.main(["--server", url, "--output", str(tmp_path), "--exact", "--min-acceptance=3"])
    assert code == 0
    report = json.loads((tmp_path / "smoke.json").read_text())
    assert report["url"] == url
    assert report["prompts"] == report["same_alone_and_together"] == 8
    assert report["tokens"] == 80
    assert (report["chat_pieces"], report["chat"]) == (2, "hello")
    assert report["tokens_per_step"] == 3.0
    assert report["failures"] == []
    assert handler.keys == {"Bearer secret"}
    assert "secret" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("behaviour", "sentence"),
    [
        ("engine died", "/v1/completions answered 500: engine is dead"),
        ("generates nothing", "nothing was generated for"),
        ("cuts the stream", "the chat's stream was cut off"),
        ("error in the stream", "the chat's stream broke off"),
        ("drafts nothing", "nothing was drafted"),
        ("rejects all", "1.0 tokens a step, less than the 1.5 asked for"),
        ("batch changes tokens", "3 of 3 prompts differ alone and together"),
        ("", "is continued by 'AB', without 'xyz'"),
    ],
)
def test_what_is_wrong_with_a_server_is_said(serve, capsys, behaviour, sentence):
    url, _ = serve(behaviour)
    call = ["--url", url, "--min-acceptance", "1.5", "--timeout", "10"]
    call += ["--prompt", "ab", "--expect", "xyz" if not behaviour else ""]
    if behaviour == "batch changes tokens":
        call += ["--exact", "--prompt", "cd", "--prompt", "ef"]
    assert remote.main(call) == 1
    assert sentence in capsys.readouterr().err


def test_a_server_that_is_not_there_is_one_sentence(capsys):
    assert remote.main(["--url", "http://127.0.0.1:1"]) == 1
    assert capsys.readouterr().err.count("\n") == 1
    assert remote.main(["--url", "localhost:8000"]) == 1
    assert "is no HTTP URL" in capsys.readouterr().err


def test_the_file_alone_runs_on_a_bare_python(serve):
    url, _ = serve()
    call = [sys.executable, "-IS", remote.__file__, "--url", url]
    done = subprocess.run(call, check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "smoke: passed, 3.00 tokens a step" in done.stdout


def test_the_api_key_comes_by_standard_input(serve, monkeypatch):
    """Arguments and a shell's assignments are in the list of processes for all to read."""
    monkeypatch.setenv("VLLM_API_KEY", "another")
    url, handler = serve()
    call = [sys.executable, "-IS", remote.__file__, "--url", url, "--api-key-stdin"]
    done = subprocess.run(
        call, input="secret\n", check=False, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert handler.keys == {"Bearer secret"}
    # An empty line is no key.
    handler.keys.clear()
    done = subprocess.run(call, input="\n", check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert handler.keys == {None}


STAND_IN_DOCKER = """#!/bin/sh
case "$1 $2" in
  "image inspect")
    [ "$3" = here ] || exit 1
    echo '[{"Config": {"Labels": {"ddtree.device": "cpu", "ddtree.vllm": "0.32.0"}}}]' ;;
esac
"""


@pytest.fixture
def docker(tmp_path):
    program = tmp_path / "docker"
    program.write_text(STAND_IN_DOCKER)
    program.chmod(0o755)
    return str(program)


def test_a_container_of_the_smoke_test_is_unprivileged_and_reads_its_model(docker):
    command = container.serve_command(docker, "here", 8123, "demo/target", "demo/drafter")
    words = " ".join(command)
    for part in (
        "--publish 127.0.0.1:8123:8000",
        "--read-only",
        "--cap-drop ALL",
        "--security-opt no-new-privileges",
        "/demo/target:/models/target:ro",
        "/demo/drafter:/models/drafter:ro",
    ):
        assert part in words
    assert "--gpus" not in words
    assert command[-3:] == ["here", "serve", "/models/target"]


def test_an_image_that_is_not_there_is_named(docker, tmp_path, capsys):
    call = ["--server", "image", "--image", "gone", "--docker", docker, "--output", str(tmp_path)]
    assert smoke.main(call) == 1
    assert "has no image gone: `make image` makes it" in capsys.readouterr().err
    with pytest.raises(ServerError, match="no nowhere-to-be-found on this machine"):
        container.engine("nowhere-to-be-found")
