# SPDX-License-Identifier: Apache-2.0
"""What the roles' templates become, and the smoke playbook. Real Ansible on this machine, no host."""

import json
import os
import re
import shlex
import socket
import subprocess
import sys
import time

import pytest
from lab_hosts import ROOT
from role_plays import PAIR, play, preflight_of, program, run_playbook

pytestmark = [pytest.mark.ansible, pytest.mark.timeout(120)]


@pytest.fixture
def render(tmp_path):
    """render("a.j2", "b.j2", variable=...) -> the text of each template, by one play."""

    def run(*templates, **variables):
        tasks = [
            {
                "ansible.builtin.template": {
                    "src": template,
                    "dest": str(tmp_path / template),
                    "mode": "0644",
                },
                "vars": {"item": PAIR},
            }
            for template in templates
        ]
        done = play(tmp_path / "play", tasks, variables)
        assert done.returncode == 0, done.stdout + done.stderr
        texts = [(tmp_path / template).read_text() for template in templates]
        return texts if len(texts) > 1 else texts[0]

    return run


def words(text, name):
    """Words of a variable of an environment file, as systemd splits them."""
    return shlex.split(re.search(rf"^{name}='(.*)'$", text, re.MULTILINE)[1])


def option(arguments, name):
    return arguments[arguments.index(name) + 1]


@pytest.mark.parametrize(
    ("host", "address"),
    [
        ("0.0.0.0", "127.0.0.1"),
        ("10.0.0.5", "10.0.0.5"),
        ("fd00::5", "[fd00::5]"),
    ],
)
def test_the_checks_ask_where_the_engine_listens(render, host, address):
    """Asked elsewhere, a healthy engine would be killed as one that answers nothing."""
    checks, started = render("health.env.j2", "vllm.env.j2", vllm_service_host=host)
    arguments = words(checks, "DDTREE_HEALTH_ARGS")
    assert option(arguments, "--url") == f"http://{address}:8000"
    assert f"\nDDTREE_URL=http://{address}:8000\n" in started


def test_the_checks_have_the_key_that_the_engine_asks_for(render):
    assert "api-key" not in render("ddtree-health@.service.j2")
    unit = render("ddtree-health@.service.j2", vllm_service_api_key="s3cret")
    assert "\nLoadCredential=api-key:/etc/ddtree/credentials/api-key\n" in unit
    assert "--api-key-file ${CREDENTIALS_DIRECTORY}/api-key" in unit
    assert "s3cret" not in unit


def test_systemd_never_gives_up_on_a_start_before_the_engine_does(render):
    """Systemd's own 90 s are less than a 55 GB model takes from a cold disk."""
    budget = 3600
    limits = {"vllm_service_start_timeout": budget, "vllm_service_free_timeout": 120}
    unit, environment = render("ddtree-vllm@.service.j2", "vllm.env.j2", **limits)
    engine = int(words(environment, "VLLM_ENGINE_READY_TIMEOUT_S")[0])
    waits = {name: int(s) for name, s in re.findall(r" (wait-\w+) .*--timeout (\d+)", unit)}
    systemd = int(re.search(r"^TimeoutStartSec=(\d+)$", unit, re.MULTILINE)[1])
    assert engine == budget
    # The engine's own error says most. Its clock starts after imports, which take half a minute.
    assert waits["wait-ready"] >= engine + 30
    # A wait ends up to 10 s, a last look at the server, or 30 s, one at the GPUs, after its limit.
    assert systemd >= waits["wait-free"] + 30 + waits["wait-ready"] + 10


TWO_SIZES = {
    "groups": [PAIR],
    "gpus": {
        "1": {"uuid": "GPU-b", "memory_mib": 24000},
        "2": {"uuid": "GPU-c", "memory_mib": 100000},
        "3": {"uuid": "GPU-d", "memory_mib": 90000},
    },
}


@pytest.mark.parametrize(
    ("variables", "free_mib"),
    [
        ({}, 0),
        ({"gpu_topology_plan": TWO_SIZES}, 90000 * 92 // 100 - 1024),
        (
            {
                "gpu_topology_plan": TWO_SIZES,
                "vllm_service_engine_args": ["--gpu_memory_utilization=0.5"],
            },
            0,
        ),
        ({"gpu_topology_plan": TWO_SIZES, "vllm_service_free_mib": 7}, 7),
    ],
)
def test_a_start_waits_for_the_memory_that_the_engine_takes(render, variables, free_mib):
    waits = words(render("vllm.env.j2", **variables), "DDTREE_WAIT")
    assert option(waits, "--free-mib") == str(free_mib)
    assert option(waits, "--gpus") == "GPU-c,GPU-d"


def test_gpus_given_by_index_have_to_be_the_planned_ones(render):
    native = render("vllm.env.j2")
    assert option(words(native, "DDTREE_WAIT"), "--indices") == "2,3"
    assert words(native, "CUDA_VISIBLE_DEVICES") == ["2,3"]
    container = render("vllm.env.j2", vllm_service_mode="container", vllm_service_image="any")
    assert "--indices" not in words(container, "DDTREE_WAIT")


@pytest.mark.parametrize(("drafter", "floor"), [("/srv/ddtree/models/drafter", "1.2"), ("", "0")])
def test_an_engine_without_a_drafter_is_held_to_no_acceptance(render, drafter, floor):
    text = render("health.env.j2", vllm_service_drafter=drafter)
    assert option(words(text, "DDTREE_HEALTH_ARGS"), "--min-acceptance") == floor


@pytest.mark.parametrize(
    ("role", "variables", "sentence"),
    [
        ("health", {"health_prompt": "It's"}, "must not hold a single quote"),
        ("health", {"health_expect": "'"}, "must not hold a single quote"),
        ("health", {"health_alert_command": "/bin/page"}, "it is a list, the program first"),
        ("vllm_service", {"vllm_service_alert_command": "/bin/page"}, "it is a list, the program"),
        ("vllm_service", {"vllm_service_served_name": "it's"}, "must not hold a single quote"),
        ("vllm_service", {"vllm_service_model": "/srv/a\nb"}, "must not hold a single quote"),
    ],
)
def test_what_systemd_would_take_apart_is_refused(tmp_path, role, variables, sentence):
    """A quote ends the quotes that a value stands in: the engine would be asked something else."""
    done = play(tmp_path / "play", preflight_of(role), variables)
    assert (done.returncode, sentence in done.stdout) == (2, True), done.stdout + done.stderr


@pytest.mark.parametrize(
    ("state", "status"), [("inactive", 2), ("failed", 2), ("active", 0), ("activating", 0)]
)
def test_a_taken_port_is_refused_unless_the_instance_itself_has_it(
    tmp_path, monkeypatch, state, status
):
    program(tmp_path, "ss", "echo 'LISTEN 0 5 0.0.0.0:8000 users:((\"other\",pid=7,fd=3))'")
    program(tmp_path, "systemctl", f"echo {state}")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    done = play(tmp_path / "play", preflight_of("vllm_service"), {})
    assert done.returncode == status, done.stdout + done.stderr
    assert ("Port 8000 is taken: LISTEN" in done.stdout) == (status == 2)


@pytest.mark.parametrize(
    ("limit", "mode", "status"),
    [
        ("64G", "container", 0),
        ("50%", "native", 0),
        ("50%", "container", 2),
        ("64g", "native", 2),
        ("0", "native", 2),
    ],
)
def test_a_limit_of_memory_that_would_be_passed_over_is_refused(
    tmp_path, monkeypatch, limit, mode, status
):
    program(tmp_path, "ss", "true")
    program(tmp_path, "systemctl", "echo inactive")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    given = {
        "vllm_service_memory_max": limit,
        "vllm_service_mode": mode,
        "vllm_service_image": "any",
    }
    done = play(tmp_path / "play", preflight_of("vllm_service"), given)
    assert done.returncode == status, done.stdout + done.stderr
    assert (f"vllm_service_memory_max is {limit}; it is a number" in done.stdout) == (status == 2)


def test_a_container_whose_gpus_have_no_uuid_is_refused(tmp_path):
    """As planned from a matrix alone: Docker would be asked for no GPU."""
    given = {
        "gpu_topology_plan": {"groups": [{**PAIR, "uuids": []}]},
        "vllm_service_mode": "container",
        "vllm_service_image": "any",
    }
    done = play(tmp_path / "play", preflight_of("vllm_service"), given)
    assert done.returncode == 2, done.stdout + done.stderr
    assert (
        "Instance 0 is planned on GPU 2, 3, and container mode chooses GPUs by UUID" in done.stdout
    )


def test_check_mode_tells_that_docker_would_be_installed(tmp_path):
    tasks = [
        {"ansible.builtin.include_tasks": str(ROOT / "roles/container_runtime/tasks/docker.yml")}
    ]
    given = {"container_runtime_docker_repository": ""}
    done = play(tmp_path / "play", tasks, given, "--check")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "docker.io would be installed." in done.stdout
    assert re.search(r"changed=1 ", done.stdout)


def variables(text):
    """The engine's variables in native mode, by name."""
    return dict(re.findall(r"^([A-Z0-9_]+)='(.*)'$", text, re.MULTILINE))


def test_a_container_gets_the_variables_that_a_native_engine_gets(render):
    """With their values: a bare name would take Docker's client's, and unset the image's own."""
    given = {"vllm_service_env": {"OMP_NUM_THREADS": 4, "WORDS": 'a "b" \\ $c %d'}}
    native = variables(render("vllm.env.j2", **given))
    text = render("vllm.env.j2", vllm_service_mode="container", vllm_service_image="any", **given)
    options = words(text, "DDTREE_CONTAINER")
    passed = dict(
        option.removeprefix("--env=").split("=", 1) for option in options if "--env" in option
    )
    assert passed["NCCL_P2P_DISABLE"] == "1"
    assert passed["HOME"] == "/var/cache/ddtree-vllm/0/0123456789abcdef"
    assert passed["OMP_NUM_THREADS"] == "4"
    own = {"CUDA_VISIBLE_DEVICES", *(name for name in native if name.startswith("DDTREE_"))}
    assert passed == {name: native[name] for name in native.keys() - own}
    assert not variables(text).keys() & passed.keys()


def test_a_container_that_was_left_goes_before_its_port_is_waited_for(render):
    unit = render(
        "ddtree-vllm@.service.j2", vllm_service_mode="container", vllm_service_image="any"
    )
    before = re.findall(r"^ExecStartPre=.*$", unit, re.MULTILINE)
    assert [line.split()[1] for line in before] == ["rm", "wait-free"]


@pytest.mark.parametrize(("version", "status"), [(249, 2), (250, 0)])
def test_an_encrypted_token_is_refused_where_systemd_cannot_read_it(
    tmp_path, monkeypatch, version, status
):
    program(tmp_path, "systemctl", f"echo 'systemd {version} ({version}.1-1)'")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    given = {"model_store_token_file": "/etc/hf.cred"}
    done = play(tmp_path / "play", preflight_of("model_store"), given)
    assert done.returncode == status, done.stdout + done.stderr
    assert ("and this host has systemd 249 (249.1-1)" in done.stdout) == (status == 2)


def test_a_question_of_several_lines_is_asked_as_it_is(tmp_path, render):
    question = {"health_prompt": 'def f("x"):\n    return \\', "health_expect": "a b"}
    done = play(tmp_path / "preflight", preflight_of("health"), question)
    assert done.returncode == 0, done.stdout + done.stderr
    text = render("health.env.j2", **question)
    arguments = shlex.split(re.search(r"^DDTREE_HEALTH_ARGS='(.*)'$", text, re.M | re.S)[1])
    assert option(arguments, "--prompt") == question["health_prompt"]
    assert option(arguments, "--expect") == "a b"


@pytest.fixture
def stand_in():
    """A server of the hosts' stand-in for vLLM that asks for a key; its port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = subprocess.Popen(
        [
            *(sys.executable, ROOT / "tests/hosts/stub/bin/ddtree-vllm", "serve", "demo"),
            *("--port", str(port)),
        ],
        env={**os.environ, "VLLM_API_KEY": "s3cret", "STUB_START_S": "0"},
        stdout=subprocess.DEVNULL,
    )
    try:
        end = time.monotonic() + 30
        while socket.socket().connect_ex(("127.0.0.1", port)) != 0:
            assert time.monotonic() < end, "the stand-in does not listen"
            time.sleep(0.1)
        yield port
    finally:
        server.terminate()
        server.wait(30)


@pytest.mark.parametrize(("expect", "status"), [("name", 0), ("Paris", 2)])
def test_the_smoke_playbook_asks_with_the_key_and_shows_it_nowhere(
    stand_in, tmp_path, expect, status
):
    (tmp_path / "topology.json").write_text(json.dumps({"groups": [{"port": stand_in}]}))
    given = {
        "ansible_connection": "local",
        "ansible_become": False,
        "ansible_host": "127.0.0.1",
        "gpu_topology_config_dir": str(tmp_path),
        "vllm_service_api_key": "s3cret",
    }
    (tmp_path / "hosts.yml").write_text(json.dumps({"ddtree": {"hosts": {"here": given}}}))
    done = run_playbook(
        tmp_path,
        *("-v", "-i", tmp_path / "hosts.yml", "-e", f"smoke_expect={expect}"),
        ROOT / "playbooks/smoke.yml",
    )
    assert done.returncode == status, done.stdout + done.stderr
    assert ("tokens a step" if status == 0 else "without 'Paris'") in done.stdout
    assert "s3cret" not in done.stdout + done.stderr
