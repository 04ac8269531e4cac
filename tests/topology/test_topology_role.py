# SPDX-License-Identifier: Apache-2.0
"""The role gpu_topology: its papers agree, and it does on a machine what it says."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import topology_machines as machines
import yaml

from ddtree_topology import planner

ROOT = Path(__file__).parents[2]
ROLE = ROOT / "roles/gpu_topology"
MODULE = ROLE / "library/gpu_topology.py"
# Options of the module that the role decides for itself.
NOT_THE_ROLES = {"ask_host", "p2p_matrix", "verdict_file"}


def load(name):
    return yaml.safe_load((ROLE / name).read_text())


def module_constants(path=MODULE):
    """The module's literals, read without ansible."""
    return {
        node.targets[0].id: ast.literal_eval(node.value)
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.Assign)
    }


def test_defaults_are_the_documented_ones():
    options = load("meta/argument_specs.yml")["argument_specs"]["main"]["options"]
    assert {name: option["default"] for name, option in options.items()} == load(
        "defaults/main.yml"
    )
    assert all(option["description"] for option in options.values())


def test_every_variable_carries_the_roles_name():
    assert all(name.startswith("gpu_topology_") for name in load("defaults/main.yml"))
    assert all(name.startswith("gpu_topology__") for name in load("vars/main.yml"))


def test_the_readme_table_is_generated():
    done = subprocess.run(
        [sys.executable, ROOT / "tools/role_readme.py", "--check", ROLE],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize("path", sorted((ROLE / "library").glob("*.py")), ids=lambda p: p.stem)
def test_the_modules_documentation_is_its_argument_spec(path):
    constants = module_constants(path)
    documented = yaml.safe_load(constants["DOCUMENTATION"])["options"]
    spec = constants["ARGUMENTS"]
    assert documented.keys() == spec.keys()
    for name, option in spec.items():
        for key in ("type", "elements", "default", "choices", "required"):
            assert documented[name].get(key) == option.get(key), (name, key)
        suboptions = documented[name].get("suboptions", {})
        assert {key: sub["type"] for key, sub in suboptions.items()} == {
            key: sub["type"] for key, sub in option.get("options", {}).items()
        }


def test_the_modules_defaults_are_the_planners_and_the_roles():
    spec = module_constants()["ARGUMENTS"]
    assert spec["tensor_parallel"]["choices"] == [0, *planner.SIZES]
    assert spec["objective"]["choices"] == list(planner.OBJECTIVES)
    assert spec["p2p"]["choices"] == list(planner.P2P_CHOICES)
    assert spec["memory_utilization"]["default"] == planner.MEMORY_UTILIZATION
    assert spec["first_port"]["default"] == planner.FIRST_PORT
    assert spec["cache_root"]["default"] == planner.CACHE_ROOT
    role = load("defaults/main.yml")
    for name, option in spec.items():
        if name not in NOT_THE_ROLES:
            assert (role[f"gpu_topology_{name}"] or None) == (option.get("default") or None), name


def test_the_role_hands_every_option_to_the_module():
    task = load("tasks/plan.yml")[0]
    assert set(task["gpu_topology"]) == module_constants()["ARGUMENTS"].keys() - {
        "ask_host",
        "p2p_matrix",
    }


def test_the_fact_holds_what_the_planner_returns():
    made = planner.plan(machines.machine("06"))
    assert {*load("vars/main.yml")["gpu_topology__keys"], "warnings"} == made.keys()
    returned = yaml.safe_load(module_constants()["RETURN"])
    assert {*returned, "objective"} == {*made, "notes"} - {"warnings"}


NVIDIA_SMI = """#!/bin/sh
case "$*" in
  "topo -m") cat {matrix};;
  "topo -p2p r") printf '\\tGPU0\\tGPU1\\nGPU0\\tX\\tOK\\nGPU1\\tOK\\tX\\n';;
  --query-gpu=*)
    echo "0, RTX PRO 6000, GPU-a, 97887, [N/A], 0000FFFF:01:00.0"
    echo "1, RTX PRO 6000, GPU-b, 97887, [N/A], 0000FFFF:02:00.0";;
  --query-compute-apps=*) ;;
  *) exit 9;;
esac
"""
PLAYBOOK = """
- name: Try the role
  hosts: all
  gather_facts: false
  tasks:
    - name: Apply it
      ansible.builtin.include_role:
        name: gpu_topology
        tasks_from: "{{ entry | default('main') }}"
"""


@pytest.fixture(scope="module")
def host(tmp_path_factory, playbook):
    """Runs the role against this machine, all of its files in a folder of its own."""
    folder = tmp_path_factory.mktemp("host")
    (folder / "bin").mkdir()
    smi = folder / "bin/nvidia-smi"
    smi.write_text(NVIDIA_SMI.format(matrix=machines.path("06")))
    smi.chmod(0o755)
    (folder / "play.yml").write_text(PLAYBOOK)

    def run(*arguments, path=str(folder / "bin"), **variables):
        variables = {
            "ansible_python_interpreter": sys.executable,
            "gpu_topology_config_dir": str(folder / "etc"),
            "gpu_topology_lib_dir": str(folder / "lib"),
            "gpu_topology_bin_dir": str(folder / "bin"),
            "gpu_topology_model_memory_mib": 62000,
            **variables,
        }
        return subprocess.run(
            [
                *(playbook, "-i", "localhost,", "-c", "local", folder / "play.yml"),
                *("-e", json.dumps(variables), *arguments),
            ],
            env={
                **os.environ,
                "PATH": f"{path}:/usr/bin:/bin",
                "ANSIBLE_ROLES_PATH": str(ROOT / "roles"),
                "ANSIBLE_HOME": str(folder / "ansible"),
                "ANSIBLE_NOCOLOR": "1",
                "ANSIBLE_STDOUT_CALLBACK": "default",
            },
            capture_output=True,
            text=True,
            check=False,
            timeout=240,
        )

    run.folder = folder
    return run


def changed(done):
    """Number of changed tasks, of a run that must have ended well."""
    assert done.returncode == 0, done.stdout + done.stderr
    recap = next(line for line in done.stdout.splitlines() if line.startswith("localhost"))
    return int(recap.split("changed=")[1].split()[0])


@pytest.mark.ansible
def test_a_host_is_planned_probed_kept_and_cleaned(host):
    folder = host.folder
    before = sorted(folder.rglob("*"))
    assert changed(host("--check")) > 0
    assert [file for file in sorted(folder.rglob("*")) if "ansible" not in file.parts] == [
        file for file in before if "ansible" not in file.parts
    ]

    assert changed(host()) == 3  # the program, its directory and the plan
    made = json.loads((folder / "etc/topology.json").read_text())
    assert [group["uuids"] for group in made["groups"]] == [["GPU-a", "GPU-b"]]
    assert made["p2p"]["on"] is False
    assert made["groups"][0]["nccl_env"] == {"NCCL_P2P_DISABLE": "1"}
    program = subprocess.run(
        [folder / "bin/ddtree-topology", "plan", "--matrix", machines.path("06")],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert "[PHB]" in program.stdout
    installed = sorted((folder / "lib/ddtree_topology").iterdir())
    sources = sorted((ROOT / "ddtree_topology").glob("*.py"))
    assert [file.read_text() for file in installed] == [file.read_text() for file in sources]
    assert changed(host()) == 0

    # What was edited or added by hand is put right.
    installed[0].write_text("")
    (folder / "lib/ddtree_topology/old.py").write_text("")
    assert changed(host()) == 1
    assert sorted((folder / "lib/ddtree_topology").iterdir()) == installed
    assert installed[0].read_text() == sources[0].read_text()

    probing = folder / "probe"
    probing.write_text(
        f"""#!/bin/sh
exec {folder}/bin/ddtree-topology "$@" --python {folder}/fake-python
"""
    )
    probing.chmod(0o755)
    (folder / "fake-python").write_text(
        """#!/bin/sh\necho '{"checked": 1, "peer_access": true}'\n"""
    )
    (folder / "fake-python").chmod(0o755)
    wanted = {
        "gpu_topology_probe": True,
        "gpu_topology_probe_command": [str(probing), "probe"],
    }
    assert changed(host(**wanted)) == 2  # the verdict and the plan
    made = json.loads((folder / "etc/topology.json").read_text())
    assert made["p2p"]["on"] is True
    assert made["groups"][0]["nccl_env"] == {}
    assert changed(host(**wanted)) == 0

    assert changed(host(entry="uninstall")) == 3
    assert not (folder / "etc").exists()
    assert not (folder / "lib").exists()
    assert not (folder / "bin/ddtree-topology").exists()


@pytest.mark.ansible
def test_what_the_probe_could_not_prove_is_told_and_tried_again(host):
    """A verdict of that is kept nowhere: it would refuse every later plan."""
    python, verdict = host.folder / "venv/bin/python", host.folder / "etc/p2p-verdict.json"
    python.parent.mkdir(parents=True)
    # The service's own interpreter is taken where there is one.
    wanted = {"gpu_topology_probe": True, "vllm_service_venv": str(host.folder / "venv")}

    def told(rank):
        python.write_text(f"#!/bin/sh\n{rank}\n")
        python.chmod(0o755)
        done = host(**wanted)
        assert done.returncode != 0
        assert not verdict.exists()
        return " ".join((done.stdout + done.stderr).split())

    assert "The probe failed with P2P on and off: P2P is off" in told("exit 3")
    said = told("echo 'python has no torch (x)'; exit 4")
    assert "The probe could not run: nothing was probed over GPU0, GPU1: python has no" in said
    assert "run site.yml with gpu_topology_probe=false, then playbooks/probe.yml" in said

    # Docker's own status for an image that is not there.
    docker = host.folder / "bin/docker"
    docker.write_text('#!/bin/sh\necho "No such image: $@" >&2\nexit 125\n')
    docker.chmod(0o755)
    container = {
        "vllm_service_mode": "container",
        "vllm_service_docker": str(docker),
        "vllm_service_image": "ddtree-vllm:gpu",
    }
    done = host(**wanted, **container)
    assert done.returncode != 0
    said = " ".join((done.stdout + done.stderr).split())
    assert "The probe could not run: No such image: run --rm --interactive --pull never" in said
    assert "--device nvidia.com/gpu=all --network none --shm-size 16g ddtree-vllm:gpu" in said
    assert "ddtree-vllm:gpu ddtree-topology probe --plan - --json" in said
    assert "In container mode the image is loaded by vllm_service: run site.yml" in said

    # Instances hold the GPUs, says a fake systemctl.
    systemctl = host.folder / "bin/systemctl"
    systemctl.write_text("#!/bin/sh\necho 'ddtree-vllm@0.service loaded active running vLLM'\n")
    systemctl.chmod(0o755)
    assert "ddtree-vllm@0.service hold them. playbooks/probe.yml stops them" in told("exit 0")

    # Asked for anew, they are stopped for it, and started again where nothing is proven.
    calls = host.folder / "calls"
    systemctl.write_text(systemctl.read_text().replace("\n", f'\necho "$1 $2" >>{calls}\n', 1))
    wanted["gpu_topology_probe_anew"] = True
    for rank, sentence in (
        ("exit 3", "The probe failed with P2P on and off: P2P is off"),
        ("echo 'python has no torch (x)'; exit 4", "The probe could not run: nothing was probed"),
    ):
        calls.unlink(missing_ok=True)
        assert sentence in told(rank)
        assert [line for line in calls.read_text().splitlines() if "list" not in line] == [
            "stop ddtree-vllm@0.service",
            "start ddtree-vllm@0.service",
        ]
    # What ends well without a verdict is none.
    for script, sentence in (
        ("exit 0", "run: {odd} gave no verdict."),
        ("echo it broke >&2; exit 1", "run: it broke."),
    ):
        odd = host.folder / "odd"
        odd.write_text(f"#!/bin/sh\n{script}\n")
        odd.chmod(0o755)
        done = host(**wanted, gpu_topology_probe_command=[str(odd)])
        assert done.returncode != 0
        assert f"The probe could not {sentence}".replace("{odd}", str(odd)) in " ".join(
            done.stdout.split()
        )
        assert not verdict.exists()
    done = host(**wanted, gpu_topology_probe_command=["/no/probe"])
    assert "The probe could not run: sh: 1: /no/probe: not found." in " ".join(done.stdout.split())
    systemctl.rename(host.folder / "systemctl")
    del wanted["gpu_topology_probe_anew"]

    python.write_text("""#!/bin/sh\necho '{"checked": 1, "peer_access": true}'\n""")
    assert changed(host(**wanted)) == 2  # the verdict and the plan
    assert json.loads((host.folder / "etc/topology.json").read_text())["p2p"]["on"] is True

    # A verdict is there: asked for anew, and the instances are left to vllm_service.
    (host.folder / "systemctl").rename(systemctl)
    calls.unlink()
    assert changed(host(**wanted, gpu_topology_probe_anew=True)) >= 1
    asked = [line.split()[0] for line in calls.read_text().splitlines()]
    assert asked == ["list-units", "stop"]
    systemctl.unlink()
    assert changed(host(entry="uninstall")) == 3


@pytest.mark.ansible
@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"gpu_topology_tensor_parallel": 3}, "value of gpu_topology_tensor_parallel must be one"),
        ({"gpu_topology_tensor_parallel": 4}, "needs 4 GPUs that are alike and free; there are 2"),
        ({"gpu_topology_gpus": [{"name": "A"}]}, "set gpu_topology_matrix as well"),
        ({"gpu_topology_matrix": machines.text("25")}, "'NIC8NIC9' has lost its tab"),
    ],
)
def test_what_cannot_be_planned_is_refused_before_anything_runs(host, variables, words):
    done = host("--check", **variables)
    assert done.returncode != 0
    assert words in done.stdout + done.stderr


@pytest.mark.ansible
def test_a_host_without_gpus_serves_only_when_asked_to(host, tmp_path):
    refused = host("--check", path=str(tmp_path))
    assert refused.returncode != 0
    assert "install the NVIDIA driver, or ask for cpu_only" in refused.stdout + refused.stderr
    done = host("--check", path=str(tmp_path), gpu_topology_cpu_only=True)
    assert done.returncode == 0, done.stdout + done.stderr
