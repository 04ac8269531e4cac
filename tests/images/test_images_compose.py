# SPDX-License-Identifier: Apache-2.0
"""images/compose.yml as Compose reads it: each profile starts with its own variables alone."""

import json
import re
import sys
from pathlib import Path

import newer_docker
import pytest
import yaml
from test_images_readme import CURL, wait_for_chat

ROOT = Path(__file__).parents[2]
FILE = ROOT / "images/compose.yml"
sys.path.insert(0, str(ROOT / "images/lib"))

from ddtree_container import settings  # noqa: E402

VARIABLE = re.compile(r"\$(?:\{(?P<name>\w+)(?:(?P<how>:?[-?+])(?P<word>[^}]*))?\}|(?P<bare>\w+))")


class RequiredVariable(Exception):
    pass


def interpolated(value, variables):
    """A value as Compose fills variables in, in every service whatever the profile."""
    if isinstance(value, dict):
        return {key: interpolated(part, variables) for key, part in value.items()}
    if isinstance(value, list):
        return [interpolated(part, variables) for part in value]
    if not isinstance(value, str):
        return value

    def fill(found):
        known = variables.get(found["name"] or found["bare"], "")
        how = (found["how"] or "").lstrip(":")
        if how == "?" and not known:
            raise RequiredVariable(found[0])
        if how == "+":
            return found["word"] if known else ""
        return known or (found["word"] if how == "-" else "")

    return VARIABLE.sub(fill, value)


def service(name, **variables):
    """A service, its environment as the container gets it."""
    whole = interpolated(yaml.safe_load(FILE.read_text()), variables)
    one = whole["services"][name]
    one["environment"] = {
        key: variables.get(key) if value is None else value
        for key, value in one["environment"].items()
        if value is not None or key in variables
    }
    return one


def test_a_variable_of_one_profile_is_not_required_by_another():
    assert service("cpu")["image"] == "ddtree-vllm:cpu"
    assert service("gpu", TARGET="/t", DRAFTER="/d")["image"] == "ddtree-vllm:gpu"
    bare = [m[0] for m in VARIABLE.finditer(FILE.read_text()) if not m["how"]]
    assert bare == [], "Compose would warn of these, and put nothing in their place"


def test_a_folder_that_is_not_named_is_refused_and_not_made():
    mounts = {m["target"]: m for m in service("gpu")["volumes"] if m["type"] == "bind"}
    assert mounts["/models/target"]["source"] == "/TARGET-is-not-set"
    assert mounts["/models/drafter"]["source"] == "/DRAFTER-is-not-set"
    assert all(m["bind"] == {"create_host_path": False} for m in mounts.values())
    assert all(m["read_only"] for m in mounts.values())


@pytest.mark.parametrize("name", ["cpu", "gpu"])
def test_every_variable_of_the_image_reaches_it(name, tmp_path):
    """As a value of the container, or as what the host does around it."""
    around = {"DDTREE_HOST": "0.0.0.0", "DDTREE_PORT": "9000", "DDTREE_API_KEY_FILE": "/key"}
    given = {v: f"a-{v}" for v in (*settings.OPTIONS, *settings.OTHERS)} | around
    got = service(name, **given)
    expected = {v: given[v] for v in given if v not in around}
    expected["DDTREE_API_KEY_FILE"] = "/run/api-key"
    if name == "gpu":
        expected |= {"DDTREE_MODEL": "/models/target", "DDTREE_DRAFTER": "/models/drafter"}
        expected["HF_HUB_OFFLINE"] = "1"
    assert got["environment"] == expected
    assert got["ports"] == ["0.0.0.0:9000:8000"]
    [key] = [m for m in got["volumes"] if m["target"] == "/run/api-key"]
    assert key["source"] == "/key"


def test_without_variables_the_demo_pair_is_served_to_this_host_alone():
    got = service("cpu")
    assert got["ports"] == ["127.0.0.1:8000:8000"]
    command = settings.serve([], got["environment"], ROOT / "demo").command
    assert command[2] == str(ROOT / "demo/target")
    assert command[command.index("--shutdown-timeout") + 1] == "60"
    assert got["environment"]["DDTREE_API_KEY_FILE"] == ""


def test_docker_waits_longer_than_requests_in_flight_have():
    assert service("cpu")["stop_grace_period"] == "1m60s"
    assert service("gpu", DDTREE_SHUTDOWN_TIMEOUT="300")["stop_grace_period"] == "1m300s"


# ---- Compose itself, on a host


@pytest.fixture(scope="module")
def composing(loaded):
    """The lab, with Docker Compose 2 and the file on node1."""
    newer_docker.install_plugin(loaded, 1, newer_docker.COMPOSE)
    loaded.put(1, FILE)
    return loaded


def compose(lab, profile, words, timeout=120, **variables):
    assignments = " ".join(f"{name}={value}" for name, value in variables.items())
    call = f"{assignments} docker compose -f /root/compose.yml --profile {profile} {words}"
    return lab.try_run(1, call, timeout)


@pytest.mark.hosts
@pytest.mark.timeout(2400)
@pytest.mark.parametrize(
    ("profile", "variables"), [("cpu", {}), ("gpu", {"TARGET": "/t", "DRAFTER": "/d"})]
)
def test_compose_itself_takes_the_file(composing, profile, variables):
    done = compose(composing, profile, "config --format json", **variables)
    assert done.returncode == 0, done.stderr
    assert "level=warning" not in done.stderr
    read = json.loads(done.stdout)["services"]
    assert [*read] == [profile]
    ours = service(profile, **variables)
    assert {k: v for k, v in read[profile]["environment"].items() if v is not None} == {
        k: v for k, v in ours["environment"].items() if v is not None
    }


@pytest.mark.hosts
@pytest.mark.engine
@pytest.mark.timeout(2400)
def test_compose_serves_the_demo_pair_and_stops_it_drained(composing):
    up = compose(composing, "cpu", "up --detach", timeout=300)
    assert up.returncode == 0, up.stderr
    try:
        text, seconds = wait_for_chat(lambda: composing.try_run(1, CURL, 300))
        print(f"docker compose: answered {text!r} after {seconds:.0f} s")
        name = compose(composing, "cpu", "ps --quiet").stdout.strip()
        host = composing.inspect(name)["HostConfig"]
        assert host["ReadonlyRootfs"] is True
        assert host["CapDrop"] == ["ALL"]
        assert compose(composing, "cpu", "stop", timeout=200).returncode == 0
        assert composing.inspect(name)["State"]["ExitCode"] == 0
    finally:
        down = compose(composing, "cpu", "down --volumes", timeout=200)
    assert down.returncode == 0, down.stderr
    assert composing.run(1, "docker ps --all --quiet") == ""


@pytest.mark.hosts
@pytest.mark.timeout(2400)
@pytest.mark.parametrize(("named", "missing"), [("TARGET", "DRAFTER"), ("DRAFTER", "TARGET")])
def test_a_model_folder_that_is_not_named_ends_compose_with_what_is_missing(
    composing, named, missing
):
    """The image is not there either: a tag of the other one stands in for it."""
    composing.run(1, "docker tag ddtree-vllm:cpu ddtree-vllm:gpu")
    try:
        done = compose(composing, "gpu", "up --detach", timeout=300, **{named: "/root"})
        assert done.returncode != 0
        assert f"bind source path does not exist: /{missing}-is-not-set" in done.stderr
    finally:
        compose(composing, "gpu", "down --volumes", timeout=200, **{named: "/root"})
        composing.run(1, "docker image rm ddtree-vllm:gpu")
