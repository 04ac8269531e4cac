# SPDX-License-Identifier: Apache-2.0
"""The module docker_daemon: settings of ours come and go, those of others stay. No Docker needed."""

import ast
import importlib.util
import json
import sys
import types
from pathlib import Path
from typing import ClassVar

import pytest
import yaml

ROOT = Path(__file__).parents[2]
MODULE = ROOT / "roles/container_runtime/library/docker_daemon.py"
CAPS = {"max-size": "50m", "max-file": "3"}
CDI = {"features": {"cdi": True}}


class Ended(Exception):
    """What the module ended with."""


class StubModule:
    """In place of AnsibleModule, which the environment of these tests need not have."""

    params: ClassVar[dict] = {}
    check_mode = False

    def __init__(self, **_):
        pass

    def exit_json(self, **result):
        raise Ended(result)

    def fail_json(self, **result):
        raise Ended({"failed": True, **result})


@pytest.fixture(scope="module")
def module():
    basic = types.ModuleType("ansible.module_utils.basic")
    basic.AnsibleModule = StubModule
    names = {"ansible": types.ModuleType("ansible"), "ansible.module_utils.basic": basic}
    names["ansible.module_utils"] = types.ModuleType("ansible.module_utils")
    before = {name: sys.modules.get(name) for name in names}
    sys.modules.update(names)
    try:
        spec = importlib.util.spec_from_file_location("docker_daemon", MODULE)
        loaded = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(loaded)
    finally:
        for name, value in before.items():
            if value is None:
                del sys.modules[name]
            else:
                sys.modules[name] = value
    return loaded


@pytest.fixture
def daemon(tmp_path, module, monkeypatch):
    """Runs the module on a file; `there` is what the file holds before."""
    monkeypatch.setattr(module, "validate", lambda path: None)
    path = tmp_path / "docker/daemon.json"

    class Daemon:
        record = tmp_path / "record.json"

        def write(self, content):
            path.parent.mkdir(exist_ok=True)
            path.write_text(content if isinstance(content, str) else json.dumps(content))

        def content(self):
            return json.loads(path.read_text()) if path.exists() else None

        def run(self, check=False, **params):
            StubModule.check_mode = check
            StubModule.params = {
                "settings": {}, "required": CDI, "log_options": CAPS, "state": "present",
                "path": str(path), "record": str(self.record), **params,
            }  # fmt: skip
            with pytest.raises(Ended) as ended:
                module.main()
            return ended.value.args[0]

    return Daemon()


def test_a_host_without_a_file_gets_ours(daemon):
    result = daemon.run()
    assert (result["changed"], result["restart"]) == (True, True)
    assert daemon.content() == {"features": {"cdi": True}, "log-opts": CAPS}
    again = daemon.run()
    assert (again["changed"], again["restart"]) == (False, False)


def test_keys_of_others_are_kept(daemon):
    theirs = {
        "data-root": "/data/docker",
        "features": {"buildkit": True},
        "log-opts": {"max-size": "1g", "labels": "x"},
        "runtimes": {"nvidia": {"path": "nvidia-container-runtime", "args": []}},
    }
    daemon.write(theirs)
    result = daemon.run()
    assert daemon.content() == {
        **theirs,
        "features": {"buildkit": True, "cdi": True},
        "log-opts": {"max-size": "1g", "labels": "x", "max-file": "3"},
    }
    assert result["kept"] == ["log-opts.max-size"]


@pytest.mark.parametrize(("driver", "capped"), [("journald", False), ("local", True), (None, True)])
def test_logs_are_capped_where_the_driver_knows_caps(daemon, driver, capped):
    """journald refuses max-size, and Docker would not start."""
    daemon.write({"log-driver": driver} if driver else {})
    daemon.run()
    assert ("log-opts" in daemon.content()) == capped


def test_our_values_can_be_changed_later_and_theirs_cannot(daemon):
    daemon.write({"log-opts": {"max-file": "9"}})
    daemon.run()
    daemon.run(log_options={"max-size": "20m", "max-file": "2"})
    assert daemon.content()["log-opts"] == {"max-size": "20m", "max-file": "9"}
    # Changed by hand since: it is theirs from now on.
    daemon.write({**daemon.content(), "log-opts": {"max-size": "7m"}})
    assert daemon.run(log_options={"max-size": "30m"})["kept"] == ["log-opts.max-size"]
    assert daemon.content()["log-opts"] == {"max-size": "7m"}


def test_removing_takes_out_ours_alone(daemon):
    theirs = {"data-root": "/d", "features": {"buildkit": True}}
    daemon.write(theirs)
    daemon.run(settings={"live-restore": True})
    assert daemon.content()["live-restore"] is True
    assert daemon.run(state="absent")["restart"] is True
    assert daemon.content() == theirs
    assert not daemon.record.exists()
    assert daemon.run(state="absent")["changed"] is False


def test_a_file_that_was_only_ours_is_removed(daemon):
    daemon.run()
    daemon.run(state="absent")
    assert daemon.content() is None


def test_a_needed_setting_that_is_switched_off_is_refused(daemon):
    daemon.write({"features": {"cdi": False}})
    result = daemon.run()
    assert result["failed"]
    assert "features.cdi is false, and true is needed" in result["msg"]
    assert daemon.content() == {"features": {"cdi": False}}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "cannot be read"),
        ("[1]", "does not hold a mapping"),
        ('{"features": 1}', "no mapping"),
    ],
)
def test_a_file_that_cannot_be_merged_is_refused_and_left(daemon, text, words):
    daemon.write(text)
    result = daemon.run()
    assert result["failed"]
    assert words in result["msg"]


def test_what_docker_does_not_accept_does_not_replace_the_file(daemon, module, monkeypatch):
    def refuse(path):
        raise module.Refused("Docker does not accept the merged file: bad")

    monkeypatch.setattr(module, "validate", refuse)
    daemon.write({"data-root": "/d"})
    assert "does not accept" in daemon.run()["msg"]
    assert daemon.content() == {"data-root": "/d"}
    assert not daemon.record.exists()


def test_check_mode_tells_and_writes_nothing(daemon):
    daemon.write({"a": 1})
    result = daemon.run(check=True)
    assert result["changed"]
    assert '"cdi": true' in result["diff"]["after"]
    assert daemon.content() == {"a": 1}


def test_the_modules_documentation_is_its_argument_spec():
    found = {
        node.targets[0].id: ast.literal_eval(node.value)
        for node in ast.parse(MODULE.read_text(), feature_version=(3, 9)).body
        if isinstance(node, ast.Assign) and node.targets[0].id in ("DOCUMENTATION", "ARGUMENTS")
    }
    documented = yaml.safe_load(found["DOCUMENTATION"])["options"]
    assert documented.keys() == found["ARGUMENTS"].keys()
    for name, option in found["ARGUMENTS"].items():
        for key in ("type", "default", "choices", "required"):
            assert documented[name].get(key) == option.get(key), (name, key)
