# SPDX-License-Identifier: Apache-2.0
"""The image in Docker, without Ansible: what it refuses, and that it serves and drains as any user."""

import json
import time

import pytest
from building import ROOT

pytestmark = [pytest.mark.hosts, pytest.mark.engine, pytest.mark.timeout(2400)]

READY_S = 900  # 30 s on two idle cores; shared ones take longer
HARDENED = "--read-only --cap-drop ALL --security-opt no-new-privileges"
PACKAGE = "/opt/ddtree/venv/lib/python3.11/site-packages/ddtree_vllm"


@pytest.mark.parametrize(
    ("options", "words", "sentence"),
    [
        ("", "--budget 999", "budget"),
        ("", "--no-such-option", "no-such-option"),
        ("", "Qwen/Qwen3.6-27B", "is no command of this image"),
        ("-e DDTREE_BUGDET=3", "", "did you mean DDTREE_BUDGET?"),
        ("-e DDTREE_MODEL=/models/target", "", "the drafter is missing: set DDTREE_DRAFTER"),
        ("", "--config /etc/vllm.yml", "--config: this image fills in options"),
        ("-e DDTREE_API_KEY_FILE=/nothing", "", "DDTREE_API_KEY_FILE=/nothing cannot be read"),
        ("--shm-size 64m", "--tensor-parallel-size 2", "/dev/shm has 64 MiB"),
        ("-v /root/empty:/var/cache/ddtree:ro", "", "HOME=/var/cache/ddtree cannot be written"),
        (
            # Its byte code does not look at the source.
            f"-v /root/broken.py:{PACKAGE}/plugin.py:ro --tmpfs {PACKAGE}/__pycache__",
            "",
            "the plugin does not load, and vLLM would serve without it: ImportError",
        ),
    ],
)
def test_what_cannot_be_served_ends_in_a_sentence_and_exit_code_2(loaded, options, words, sentence):
    loaded.run(
        1, "mkdir -p /root/empty; echo 'raise ImportError(\"no such thing\")' >/root/broken.py"
    )
    done = loaded.try_run(1, f"docker run --rm {HARDENED} {options} ddtree-vllm:cpu {words}", 600)
    assert sentence in done.stdout + done.stderr, done.stdout + done.stderr
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stdout + done.stderr


def test_help_among_options_is_no_server_that_died(loaded):
    done = loaded.try_run(1, f"docker run --rm {HARDENED} ddtree-vllm:cpu --budget 3 --help", 600)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("usage: ddtree-vllm serve MODEL")
    assert "ddtree-entrypoint" not in done.stderr


def test_a_container_that_runs_a_shell_is_not_healthy(loaded):
    loaded.run(1, "docker run --detach --name shell ddtree-vllm:cpu bash -c 'sleep 600; true'")
    try:
        done = loaded.try_run(1, "docker exec shell /opt/ddtree/bin/ddtree-entrypoint healthcheck")
        assert done.returncode == 1
        assert "this container does not serve: its first process is bash -c" in done.stderr
    finally:
        loaded.try_run(1, "docker rm --force --volumes shell")


def test_a_container_that_is_not_root_has_a_passwd_entry_and_a_cache_to_write_to(loaded):
    words = "import os, pwd; print(pwd.getpwuid(os.getuid())); open(os.environ['HOME'] + '/x', 'w')"
    call = f"docker run --rm {HARDENED} --entrypoint python3 ddtree-vllm:cpu -c"
    said = loaded.run(1, f'{call} "{words}"')
    assert "pw_name='ddtree'" in said
    assert "pw_uid=10001" in said


def test_doctor_is_content_as_any_user(loaded):
    call = f"docker run --rm {HARDENED} --user 12345:12345 ddtree-vllm:cpu doctor --json"
    report = json.loads(loaded.run(1, call, 600))
    assert report["ok"] is True
    assert report["plugin"] == {"registered": True, "loads": True}


def test_any_user_serves_and_a_stop_drains(loaded):
    lab = loaded
    lab.put(1, ROOT / "tests/images/streaming_client.py")
    lab.run(
        1,
        f"docker run --detach --name any --user 12345 {HARDENED} --publish 8001:9000 "
        "-e DDTREE_PORT=9000 -e DDTREE_SHUTDOWN_TIMEOUT=300 ddtree-vllm:cpu --no-speculation",
    )
    try:
        end = time.monotonic() + READY_S
        while lab.try_run(1, "curl -sf http://127.0.0.1:8001/health").returncode != 0:
            look = lab.inspect("any")["State"]
            assert look["Running"], lab.try_run(1, "docker logs any").stderr[-3000:]
            assert time.monotonic() < end, "not ready"
            time.sleep(1)
        # One stream, under way when the container is stopped.
        done = lab.run(
            1,
            "rm -rf /root/one; mkdir /root/one; "
            "python3 /root/streaming_client.py 127.0.0.1 8001 /root/one >/root/one/said & "
            "timeout 200 sh -c 'until grep -q began.:.1 /root/one/seen 2>/dev/null; do sleep 0.1; done'; "
            "touch /root/one/stop; docker stop --time 320 any >/dev/null; wait; cat /root/one/said",
            600,
        )
        assert json.loads(done) == {"began": 1, "finished": 1, "turned away": 0, "broken": []}
        state = lab.inspect("any")["State"]
        assert state["ExitCode"] == 0
        logs = lab.try_run(1, "docker logs any 2>&1").stdout
        assert "SIGTERM: requests in flight have 300 s to finish" in logs
        assert "no speculation" in logs
    finally:
        lab.try_run(1, "docker rm --force --volumes any")


def test_the_smoke_test_takes_its_servers_from_the_image(loaded):
    """What `make smoke SMOKE_TARGET=image` calls, on the host that has Docker and the image."""
    packages = ROOT / ".venv/lib/python3.11/site-packages"
    done = loaded.try_run(
        1,
        f"cd {ROOT} && PYTHONPATH={packages} PYTHONDONTWRITEBYTECODE=1 python3 -m ddtree_vllm.smoke "
        f"--server image --output /root/smoke --ready-timeout {READY_S}",
        2000,
    )
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "smoke: passed, every token the same" in done.stdout
    assert loaded.run(1, "docker ps --all --quiet") == ""
