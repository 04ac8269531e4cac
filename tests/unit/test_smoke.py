# SPDX-License-Identifier: Apache-2.0
"""The smoke test itself: it passes when engines agree, and fails, legibly, when they do not.

A stand-in for the server answers over HTTP from a table, so no engine is needed.
"""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from ddtree_vllm.smoke import __main__ as smoke
from ddtree_vllm.smoke import container
from ddtree_vllm.smoke.prompts import PROMPTS
from ddtree_vllm.smoke.report import complaints, identical
from ddtree_vllm.smoke.server import ServerError, counter, free_port, running_server

STAND_IN = """
import http.server, json, sys

options = sys.argv[1:]
port = int(options[options.index("--port") + 1])
tree = "--budget" in options and "chain" not in options
drafts, accepted = (10, 30) if tree else (10, 15)
BEHAVIOUR = {behaviour!r}
if BEHAVIOUR == "dies":
    sys.exit("no such option")


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def answer(self, text):
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def do_GET(self):
        self.answer(
            'vllm:spec_decode_num_drafts_total{{engine="0"}} %d\\n'
            'vllm:spec_decode_num_accepted_tokens_total{{engine="0"}} %d\\n' % (drafts, accepted)
        )

    def do_POST(self):
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        ids = [len(request["prompt"]), int(request["temperature"]), request["max_tokens"]]
        if BEHAVIOUR == "greedy differs" and tree and not request["temperature"]:
            ids[2] += 1
        if BEHAVIOUR == "seeded differs" and tree and request["temperature"]:
            ids[2] += 1
        assert request["return_token_ids"] is True
        choice = dict(index=0, text=str(ids), token_ids=ids, finish_reason="length", logprobs=None)
        self.answer(
            json.dumps(
                dict(id="0", object="text_completion", created=0, model="m", choices=[choice])
            )
        )


if BEHAVIOUR == "tree is worse" and tree:
    accepted = 5
http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


@pytest.fixture
def compare(tmp_path, monkeypatch):
    """Runs the smoke test against stand-ins; returns its exit code and the report, if any."""

    def run(behaviour=""):
        server = tmp_path / "server.py"
        server.write_text(STAND_IN.format(behaviour=behaviour))
        monkeypatch.setattr(smoke, "_serve_command", lambda target: [sys.executable, str(server)])
        monkeypatch.setattr(smoke.checkpoints, "open_checkpoint", lambda role, path: None)
        handler = signal.getsignal(signal.SIGTERM)
        try:
            code = smoke.main(["--output", str(tmp_path), "--ready-timeout", "30"])
        finally:
            signal.signal(signal.SIGTERM, handler)
        report = tmp_path / "smoke.json"
        return code, json.loads(report.read_text()) if report.exists() else None

    return run


def test_engines_that_agree_pass_and_the_report_has_the_agreed_form(compare, capsys):
    code, report = compare()
    assert code == 0
    assert report == {
        "vllm": "0.32.0",
        "device": report["device"],
        "prompts": 8,
        "identical_greedy": True,
        "identical_seeded": True,
        "ar": {"tokens_per_step": 1.0},
        "chain": {"tokens_per_step": 2.5},
        "ddtree": {"budget": 31, "tokens_per_step": 4.0},
    }
    assert report["device"] in ("cpu", "cuda")
    printed = capsys.readouterr().out
    assert "tree of 31" in printed
    assert "identical" in printed
    assert "DIFFERS" not in printed


@pytest.mark.parametrize("part", ["greedy", "seeded"])
def test_a_differing_token_fails_and_says_where(compare, capsys, part):
    code, report = compare(f"{part} differs")
    assert code == 1
    assert report[f"identical_{part}"] is False
    assert report[{"greedy": "identical_seeded", "seeded": "identical_greedy"}[part]] is True
    printed = capsys.readouterr()
    assert "DIFFERS" in printed.out
    assert f"tree of 31, {part}, prompt" in printed.err
    assert "from token 2" in printed.err


def test_a_tree_that_needs_more_steps_than_the_chain_fails(compare, capsys):
    code, report = compare("tree is worse")
    assert code == 1
    assert report["identical_greedy"] is True
    assert "the tree makes 1.50 tokens a step, the chain 2.50" in capsys.readouterr().err


def test_a_server_that_dies_fails_with_the_end_of_its_log(compare, capsys):
    code, report = compare("dies")
    assert code == 1
    assert report is None
    assert "no such option" in capsys.readouterr().err


def test_missing_weights_fail_before_anything_is_started(tmp_path, capsys):
    code = smoke.main(["--output", str(tmp_path), "--target", str(tmp_path / "gone")])
    assert code == 1
    assert "gone does not exist" in capsys.readouterr().err


def test_a_server_that_never_answers_times_out_and_is_stopped(tmp_path):
    command = [sys.executable, "-c", "import time; time.sleep(600)"]
    with running_server(lambda port: command, tmp_path / "log") as server:
        with pytest.raises(ServerError, match="not ready after 1 s"):
            server.wait_until_ready(1, lambda: None)
        assert server.process.poll() is None
    assert server.process.poll() == -signal.SIGTERM


def test_prompts_are_eight_and_different():
    assert len(set(PROMPTS)) == len(PROMPTS) >= 8


def test_counters_are_summed_over_labels():
    metrics = 'a_total{engine="0"} 3.0\na_total{engine="1"} 4\na_total_created{engine="0"} 9\n'
    assert counter(metrics, "a_total") == 7
    assert counter(metrics, "b_total") == 0


def test_an_answer_cut_short_counts_as_a_difference():
    from ddtree_vllm.smoke.report import Contestant, Result
    from ddtree_vllm.smoke.server import Completion

    whole, short = Completion((1, 2, 3), "abc"), Completion((1, 2), "ab")
    results = {
        "ar": Result(greedy=[whole] * 8),
        "chain": Result(greedy=[whole] * 8),
        "ddtree": Result(greedy=[whole] * 7 + [short]),
    }
    for result in results.values():
        result.seeded = [whole, whole]
    assert not identical(results, "greedy")
    assert identical(results, "seeded")
    contestants = [Contestant(key, key, ()) for key in results]
    [sentence] = complaints(contestants, results)
    assert "from token 2 on ()" in sentence


def test_a_stopped_smoke_test_leaves_no_server_behind(tmp_path):
    """SIGTERM, as from `timeout`, reaches the servers too."""
    server = tmp_path / "server.py"
    server.write_text(
        "import os, time; open(f'started-{os.getpid()}', 'w').close(); time.sleep(600)"
    )
    code = (
        "import sys\n"
        "from ddtree_vllm.smoke import __main__ as smoke\n"
        f"smoke._serve_command = lambda t: [sys.executable, {str(server)!r}]\n"
        "smoke.checkpoints.open_checkpoint = lambda role, path: None\n"
        f"smoke.main(['--output', {str(tmp_path)!r}])\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path)
    deadline = time.monotonic() + 60
    while len(list(tmp_path.glob("started-*"))) < 3:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    process.terminate()
    assert process.wait(60) == 143
    for started in tmp_path.glob("started-*"):
        with pytest.raises(ProcessLookupError):
            os.kill(int(started.name.removeprefix("started-")), 0)


@pytest.fixture
def put_stand_in(tmp_path, monkeypatch):
    """Puts a program on a PATH that holds nothing else."""
    monkeypatch.setenv("PATH", str(tmp_path))

    def put(name, body):
        program = tmp_path / name
        program.write_text(f"#!/bin/sh\n{body}\n")
        program.chmod(0o755)
        return str(program)

    return put


ANSWERS_INFO = '[ "$*" = info ]'


def test_a_docker_without_its_daemon_is_passed_over_for_podman_with_stand_in_programs(put_stand_in):
    docker, podman = put_stand_in("docker", "exit 1"), put_stand_in("podman", ANSWERS_INFO)
    assert container.engine("") == podman
    assert container.engine("docker") == docker
    put_stand_in("docker", ANSWERS_INFO)
    assert container.engine("") == docker


def test_a_docker_that_hangs_is_passed_over_for_podman_with_stand_in_programs(
    put_stand_in, monkeypatch
):
    monkeypatch.setattr(container, "INFO_TIMEOUT_S", 0.3)
    put_stand_in("docker", "exec /bin/sleep 60")
    podman = put_stand_in("podman", ANSWERS_INFO)
    assert container.engine("") == podman


def test_engines_that_do_not_answer_are_a_sentence_with_stand_in_programs(put_stand_in):
    put_stand_in("docker", "exit 1")
    with pytest.raises(
        ServerError, match=r"answers `info`.*start docker's daemon, or install podman"
    ):
        container.engine("")


def test_free_port_is_free():
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", free_port()))
