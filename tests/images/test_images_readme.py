# SPDX-License-Identifier: Apache-2.0
"""The README's three ways to serve, typed as they stand there, each asked as it says."""

import json
import os
import re
import shutil
import subprocess
import time

import pytest
from building import ROOT
from lab_hosts import changed

pytestmark = [pytest.mark.hosts, pytest.mark.engine, pytest.mark.timeout(2400)]

READY_S = 900  # a minute on two idle cores; shared ones take longer
SECTION = (ROOT / "README.md").read_text().split("## Three ways to serve")[1].split("\n## ")[0]
BLOCKS = re.findall(r"```\n(.*?)```", SECTION, re.DOTALL)
DOCKER, ANSIBLE, PIP, CURL = BLOCKS


def second_line(block):
    """The command that serves; the first line of each block prepares."""
    return block.strip().splitlines()[1]


def wait_for_chat(ask):
    """Asks until there is an answer; returns the text of the chat and how long it took."""
    began = time.monotonic()
    while time.monotonic() - began < READY_S:
        done = ask()
        if done.returncode == 0:
            answer = json.loads(done.stdout)
            assert answer["model"] == "demo", answer
            assert answer["usage"]["completion_tokens"] > 0
            return answer["choices"][0]["message"]["content"], time.monotonic() - began
        time.sleep(1)
    raise AssertionError(f"no answer within {READY_S} s: {done.stderr}")


def test_docker_run(loaded):
    lab = loaded
    assert DOCKER.startswith("make image")
    command = second_line(DOCKER)
    lab.run(1, f"systemd-run --quiet --unit readme {command}")
    try:
        text, seconds = wait_for_chat(lambda: lab.try_run(1, CURL, 300))
        print(f"docker run: answered {text!r} after {seconds:.0f} s")
        # The image's own health check agrees.
        container = lab.run(1, "docker ps --quiet").strip()
        end = time.monotonic() + 120
        while (health := lab.inspect(container)["State"]["Health"])["Status"] != "healthy":
            assert time.monotonic() < end, health
            time.sleep(2)
    finally:
        lab.try_run(1, "docker stop --time 60 $(docker ps --quiet)", 120)
        lab.try_run(1, "systemctl reset-failed readme", 30)


def test_ansible_playbook(loaded, archive):
    lab = loaded
    assert ANSIBLE.startswith("make image ansible ARCHIVE=build/images/cpu.tar\n")
    wanted = ROOT / "build/images/cpu.tar"
    if not wanted.exists():
        wanted.parent.mkdir(parents=True, exist_ok=True)
        wanted.symlink_to(archive)
    # What ssh has to know of a host of the lab; a person has that in ~/.ssh.
    ssh = (
        f"export ANSIBLE_PRIVATE_KEY_FILE={lab.key} ANSIBLE_HOST_KEY_CHECKING=false "
        "ANSIBLE_SSH_COMMON_ARGS='-o UserKnownHostsFile=/dev/null'; "
    )
    command = second_line(ANSIBLE).replace("HOST", "10.78.0.11")
    assert changed(lab.outside("bash", "-c", ssh + command, timeout=2400)) > 0
    text, _ = wait_for_chat(lambda: lab.try_run(1, CURL, 300))
    print(f"Ansible: answered {text!r}")


def test_with_pip(tmp_path):
    """On a copy of the sources; in a network namespace: port 8000 of this machine may be somebody's."""
    copy = tmp_path / "sources"
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".*", "build", "__pycache__"))
    install, serve = PIP.strip().splitlines()
    # PyTorch's index is not reached from everywhere, and need not be where its build is at hand.
    subprocess.run(
        ["bash", "-c", install],
        cwd=copy,
        check=True,
        timeout=1200,
        env={**os.environ, "PIP_RETRIES": "0"},
    )
    log = (tmp_path / "log").open("w")
    server = subprocess.Popen(
        ["unshare", "--net", "bash", "-c", f"ip link set lo up && exec {serve}"],
        cwd=copy,
        stdout=log,
        stderr=subprocess.STDOUT,
        env={**os.environ, "VLLM_CPU_OMP_THREADS_BIND": "nobind"},
    )

    def ask():
        assert server.poll() is None, (tmp_path / "log").read_text()[-3000:]
        enter = ["nsenter", f"--net=/proc/{server.pid}/ns/net", "bash", "-c", CURL]
        return subprocess.run(enter, check=False, capture_output=True, text=True, timeout=300)

    try:
        text, seconds = wait_for_chat(ask)
        print(f"pip: answered {text!r} after {seconds:.0f} s")
    finally:
        server.terminate()
        server.wait(60)
        shutil.rmtree(copy)  # gigabytes
