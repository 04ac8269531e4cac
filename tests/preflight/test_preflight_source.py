# SPDX-License-Identifier: Apache-2.0
"""The promise that module and package agree."""

import ast
from dataclasses import fields
from pathlib import Path

import pytest
import yaml

from ddtree_preflight.request import Request

ROOT = Path(__file__).parents[2]
ROLE = ROOT / "roles/preflight"
MODULES = [
    ROLE / "library/host_preflight.py",
    ROOT / "roles/model_store/library/model_store_config.py",
]
SOURCES = sorted((ROOT / "ddtree_preflight").glob("*.py"))


def test_the_roles_ship_these_very_sources():
    for role, package in (("preflight", "ddtree_preflight"), ("preflight", "ddtree_health"),
                          ("model_store", "ddtree_models")):  # fmt: skip
        link = ROOT / "roles" / role / "module_utils" / package
        assert link.resolve() == ROOT / package
        assert not Path(link.readlink()).is_absolute()


def constants(path):
    found = {}
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign):
            found[node.targets[0].id] = ast.literal_eval(node.value)
    return found


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_the_modules_documentation_is_its_argument_spec(path):
    found = constants(path)
    documented = yaml.safe_load(found["DOCUMENTATION"])["options"]
    assert documented.keys() == found["ARGUMENTS"].keys()
    for name, option in found["ARGUMENTS"].items():
        for key in ("type", "elements", "default", "choices", "required"):
            assert documented[name].get(key) == option.get(key), (name, key)
        assert {
            key: sub["type"] for key, sub in documented[name].get("suboptions", {}).items()
        } == {key: sub["type"] for key, sub in option.get("options", {}).items()}


def test_the_modules_options_and_defaults_are_the_requests():
    arguments = constants(MODULES[0])["ARGUMENTS"]
    request = Request()
    names = {item.name for item in fields(Request)} - {"systemd_min", "own_units"}
    assert arguments.keys() == names
    for name, option in arguments.items():
        value = getattr(request, name)
        assert option["default"] == (list(value) if isinstance(value, tuple) else value), name


def test_the_role_asks_with_every_option():
    """One that it left out would be checked by its default for ever."""
    tasks = yaml.safe_load((ROLE / "tasks/look.yml").read_text())
    (asked,) = [task["host_preflight"] for task in tasks if "host_preflight" in task]
    assert constants(MODULES[0])["ARGUMENTS"].keys() - asked.keys() == {"vllm_version"}
    assert "preflight__groups" in asked["planned_gpus"]


def test_every_check_is_in_the_readme():
    named = set()
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            said = isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("refuse", "warn")
            if said and isinstance(node.args[0], ast.Constant):
                named.add(node.args[0].value)
    text = (ROLE / "README.md").read_text()
    assert len(named) > 12
    assert {name for name in named if f"`{name}`" not in text} <= {"upgrades"}
