# SPDX-License-Identifier: Apache-2.0
"""What tasks of the roles refuse and do, one part at a time. Real Ansible on this machine, no host."""

import os
import re
import time

import pytest
from lab_hosts import ROOT
from role_plays import play, program

pytestmark = [pytest.mark.ansible, pytest.mark.timeout(120)]


@pytest.mark.parametrize(
    ("part", "passwd", "group", "who"),
    [
        ("preflight", "ddtree:x:10001:10001::/:/bin/false", "ddtree:x:10001:", ""),
        ("preflight", "ddtree:x:990:10001::/:/bin/false", "", "user ddtree of number 990"),
        ("account", "ddtree:x:990:10001::/:/bin/false", "", "user ddtree of number 990"),
        (
            "preflight",
            "ddtree:x:10001:990::/:/bin/false",
            "ddtree:x:990:",
            "group ddtree of number",
        ),
        ("preflight", "other:x:10001:10001::/:/bin/sh", "", "user other of number 10001"),
    ],
)
def test_a_user_is_never_renumbered(tmp_path, monkeypatch, part, passwd, group, who):
    """Its files would become another's. Asked by the part that makes the user too."""
    (tmp_path / "passwd").write_text(f"{passwd}\n")
    (tmp_path / "group").write_text(f"{group}\n")
    # By name or by number, as getent finds them.
    program(
        tmp_path,
        "getent",
        f"grep -E \"^($2:|[^:]*:x:$2:)\" '{tmp_path}'/$1 || exit 2",
    )
    program(tmp_path, "ss", "true")
    program(tmp_path, "systemctl", "echo inactive")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    tasks = [{"ansible.builtin.include_tasks": str(ROOT / f"roles/vllm_service/tasks/{part}.yml")}]
    done = play(tmp_path / "play", tasks, {}, "--check")
    said = re.findall(r"The host has a (.*?),? and ddtree would be 10001", done.stdout)
    assert {who in sentence for sentence in said} == ({True} if who else set()), done.stdout
    assert done.returncode == (2 if who else 0), done.stdout + done.stderr


@pytest.mark.parametrize(
    ("role", "tag", "said"),
    [
        ("nvidia_host", "settings", "Put them into effect"),
        ("container_runtime", "install", "Install Docker"),
    ],
)
def test_a_role_whose_preflight_is_left_out_goes_by_what_is_there(
    tmp_path, monkeypatch, role, tag, said
):
    """Neither an undefined variable at its end, nor another Docker over the one that is there."""
    program(tmp_path, "docker", "echo 'Docker version 29.1.3, build f52814d'")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("ANSIBLE_ROLES_PATH", str(ROOT / "roles"))
    tasks = [{"ansible.builtin.import_role": {"name": role}}]
    given = {"container_runtime_enabled": True, "container_runtime_gpus": False}
    options = ("--check", "--skip-tags", "preflight", "--tags", tag)
    done = play(tmp_path / "play", tasks, given, *options)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"TASK [{role} : {said}]" in done.stdout
    assert "would be installed." not in done.stdout


@pytest.mark.parametrize(
    ("doctor", "status", "said"),
    [
        ('echo "$HOME $HF_HUB_OFFLINE"', 0, ""),
        ("echo no vLLM is installed; exit 1", 2, "doctor is not content: no vLLM is installed"),
        ("exit 3", 2, "doctor is not content: it ended with 3"),
        ("sleep 100", 2, "doctor is not content: it did not end within 3 s. `journalctl -k`"),
    ],
)
@pytest.mark.parametrize("mode", [[], ["--check"]], ids=["run", "check"])
def test_a_doctor_is_asked_for_a_limited_time(tmp_path, mode, doctor, status, said):
    (tmp_path / "venv/bin").mkdir(parents=True)
    program(tmp_path / "venv/bin", "ddtree-vllm", f"echo $$ >'{tmp_path}/pid'\n{doctor}")
    tasks = [{"ansible.builtin.include_tasks": str(ROOT / "roles/vllm_service/tasks/venv.yml")}]
    given = {
        "vllm_service_venv": str(tmp_path / "venv"),
        "vllm_service_install": False,
        "vllm_service__doctor_timeout": 3,
    }
    done = play(tmp_path / "play", tasks, given, "-v", *mode)
    assert (done.returncode, said in done.stdout) == (status, True), done.stdout + done.stderr
    assert status or '"stdout": "/nonexistent 1"' in done.stdout
    process = f"/proc/{(tmp_path / 'pid').read_text().strip()}"
    end = time.monotonic() + 30
    while os.path.exists(process):
        assert time.monotonic() < end, "the doctor goes on"
        time.sleep(0.1)


@pytest.mark.parametrize("part", ["preflight", "install"])
@pytest.mark.parametrize(
    ("second", "said"),
    [
        ("/b/pins.txt", "/a/pins.txt and /b/pins.txt have one name, by which"),
        ("/b/other.txt", ""),
        ("/a/pins.txt", ""),
    ],
)
def test_requirements_of_one_name_are_refused(tmp_path, part, second, said):
    """One would take the other's place on the host, anew at each run."""
    tasks = [{"ansible.builtin.include_tasks": str(ROOT / f"roles/vllm_service/tasks/{part}.yml")}]
    given = {
        "vllm_service_requirements": ["/a/pins.txt", second],
        "vllm_service_wheels": ["/a/one.whl"],
        "vllm_service_venv": str(tmp_path / "venv"),
        "vllm_service_system_packages": [],
    }
    done = play(tmp_path / "play", tasks, given, "--check")
    assert ("have one name" in done.stdout, said in done.stdout) == (bool(said), True), done.stdout
    after = {"preflight": "Look for who listens", "install": "Look at what the path"}[part]
    assert (f"TASK [{after}" in done.stdout) == (not said)


@pytest.mark.parametrize(
    ("given", "docker", "said"),
    [
        ({}, "exit 0", ""),
        (
            {},
            "echo 'CUDA does not initialise (error 999)' >&2; exit 2",
            "Instance 0 runs and does not reach its GPUs any more, as after a reload of systemd "
            "(CUDA does not initialise (error 999)): `systemctl restart ddtree-vllm@0`",
        ),
        # A container that is being started again has lost nothing.
        ({}, "echo 'container is not running' >&2; exit 1", ""),
        ({"vllm_service_mode": "native"}, "exit 2", ""),
        ({"health_groups": [{"instance": "0", "gpus": []}]}, "exit 2", ""),
    ],
)
def test_a_container_that_lost_its_gpus_is_named(tmp_path, given, docker, said):
    """ "Failed to initialize NVML: Unknown Error", after any reload of systemd."""
    program(tmp_path, "docker", f"echo \"$*\" >>'{tmp_path}/asked'; {docker}")
    tasks = [{"ansible.builtin.include_tasks": str(ROOT / "roles/health/tasks/cuda.yml")}]
    container = {
        "vllm_service_mode": "container",
        "vllm_service_docker": str(tmp_path / "docker"),
    }
    done = play(tmp_path / "play", tasks, {**container, **given})
    assert done.returncode == (2 if said else 0), done.stdout + done.stderr
    assert said in done.stdout
    asked = tmp_path / "asked"
    exec_cuda = "exec ddtree-vllm-0 /opt/ddtree/bin/ddtree-entrypoint cuda\n"
    assert (asked.read_text() if asked.exists() else "") == ("" if given else exec_cuda)
