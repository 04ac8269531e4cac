# SPDX-License-Identifier: Apache-2.0
"""What can be said of the roles by reading them. No host, no Ansible."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
ROLES = sorted(path.parent.parent for path in ROOT.glob("roles/*/defaults/main.yml"))


def load(path):
    return yaml.safe_load(path.read_text())


def role(name):
    return ROOT / "roles" / name


@pytest.fixture(params=ROLES, ids=lambda path: path.name)
def any_role(request):
    return request.param


def test_defaults_are_the_documented_ones(any_role):
    entries = load(any_role / "meta/argument_specs.yml")["argument_specs"]
    defaults = load(any_role / "defaults/main.yml")
    options = entries["main"]["options"]
    assert {name: option["default"] for name, option in options.items()} == defaults
    for name, entry in entries.items():
        for variable, option in entry["options"].items():
            assert option["default"] == defaults[variable], (name, variable)
            assert option["description"]


@pytest.mark.parametrize("name", ["vllm_service", "health"])
def test_every_part_documents_the_variables_that_it_reads(name):
    """Those that its own tasks name; Ansible checks the values of no others."""
    for part, entry in load(role(name) / "meta/argument_specs.yml")["argument_specs"].items():
        tasks = (role(name) / f"tasks/{part}.yml").read_text()
        read = set(re.findall(rf"\b{name}_(?!_)\w+", tasks))
        assert read <= entry["options"].keys(), part


def test_every_variable_carries_the_roles_name(any_role):
    name = any_role.name
    assert all(variable.startswith(f"{name}_") for variable in load(any_role / "defaults/main.yml"))
    assert all(variable.startswith(f"{name}__") for variable in load(any_role / "vars/main.yml"))


def test_the_readme_table_is_generated(any_role):
    done = subprocess.run(
        [sys.executable, ROOT / "tools/role_readme.py", "--check", any_role],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (done.returncode, done.stdout) == (0, "")


def test_every_part_of_a_role_can_be_chosen_by_tag(any_role):
    for task in load(any_role / "tasks/main.yml"):
        assert task["tags"][0] == any_role.name, task["name"]


def test_every_inventory_sets_variables_that_exist():
    known = {name for path in ROLES for name in load(path / "defaults/main.yml")}
    for path in ROOT.glob("inventories/*/group_vars/*.yml"):
        assert load(path).keys() <= known, path


def test_the_program_has_one_source():
    link = role("health") / "files/ddtree_health"
    assert link.is_symlink()
    assert link.resolve() == ROOT / "ddtree_health"
    module = role("health") / "library/python_program.py"
    assert module.resolve() == role("gpu_topology") / "library/python_program.py"


def test_an_engine_has_no_less_time_to_start_than_vllm_gives_it():
    assert load(role("vllm_service") / "defaults/main.yml")["vllm_service_start_timeout"] >= 600


def test_systemd_never_kills_a_drain():
    variables = load(role("vllm_service") / "vars/main.yml")
    assert variables["vllm_service__stop_timeout"] == "{{ vllm_service_drain_timeout + 30 }}"
    environment = (role("vllm_service") / "templates/vllm.env.j2").read_text()
    assert "'--shutdown-timeout', vllm_service_drain_timeout" in environment


def test_an_engine_that_ends_with_0_is_restarted_and_not_for_ever():
    unit = (role("vllm_service") / "templates/ddtree-vllm@.service.j2").read_text()
    assert re.search(r"^Restart=always$", unit, re.MULTILINE)
    defaults = load(role("vllm_service") / "defaults/main.yml")
    # The limit is reached even if every start takes all of its time and the wait before it.
    started = (
        sum(
            defaults[f"vllm_service_{part}"]
            for part in ("start_timeout", "free_timeout", "restart_delay")
        )
        + 45
    )  # what the wait for readiness has beyond the engine's own limit
    burst = defaults["vllm_service_start_limit_burst"]
    assert defaults["vllm_service_start_limit_interval"] > burst * started


def test_a_reload_comes_from_a_changed_unit_alone():
    """`daemon-reload` can detach GPUs from containers that run."""
    for name in ("vllm_service", "health"):
        for path in (role(name) / "tasks").glob("*.yml"):
            assert "daemon_reload" not in path.read_text(), path
            for task in load(path):
                if "Reload systemd" not in str(task.get("notify", "")):
                    continue
                # Written by this run, or by one that ended before its handler.
                assert re.search("/etc/systemd/system|NeedDaemonReload", str(task)), (path, task)


def test_gpus_are_named_to_containers_after_their_nodes_are_made():
    """Without an order a boot may leave /dev/nvidia-uvm out of the specification."""
    unit = (role("container_runtime") / "templates/ddtree-cdi.service.j2").read_text()
    after = re.search(r"^After=(.*)$", unit, re.MULTILINE)[1].split()
    assert "ddtree-nvidia-host.service" in after
    makes = (role("nvidia_host") / "templates/ddtree-nvidia-host.service.j2").read_text()
    assert "ddtree-cdi" not in makes


def test_health_looks_at_least_twice_before_it_calls_a_hang():
    defaults = load(role("health") / "defaults/main.yml")
    assert defaults["health_stall_after"] >= 2 * defaults["health_generate_timeout"]
    assert defaults["health_stall_after"] >= 2 * defaults["health_interval"]
