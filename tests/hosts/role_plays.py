# SPDX-License-Identifier: Apache-2.0
"""Tasks of the roles by themselves: real Ansible on this machine, no host, stand-ins for its programs."""

import json
import os
import subprocess

from lab_hosts import ROOT, find_playbook

PAIR = {
    "instance": "0",
    "gpus": [2, 3],
    "uuids": ["GPU-c", "GPU-d"],
    "cpuset": "0-3",
    "memory_node": "0",
    "env": {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"},
    "nccl_env": {"NCCL_P2P_DISABLE": "1"},
    "engine_args": ["--tensor-parallel-size", "2"],
    "port": 8000,
    "cache_dir": "/var/cache/ddtree-vllm/0",
    "cache_key": "0123456789abcdef",
}


def play(folder, tasks, variables, *arguments):
    """Runs tasks on this machine as the roles would; returns the finished process."""
    folder.mkdir(exist_ok=True)
    for role in ("vllm_service", "health"):
        for file in (ROOT / "roles" / role / "templates").iterdir():
            link = folder / "templates" / file.name
            link.parent.mkdir(exist_ok=True)
            if not link.exists():
                link.symlink_to(file)
    names = ("vllm_service", "health", "model_store", "container_runtime")
    roles = [ROOT / "roles" / role for role in names]
    book = {
        "hosts": "localhost",
        "connection": "local",
        "gather_facts": False,
        "vars_files": [
            str(role / part / "main.yml") for part in ("defaults", "vars") for role in roles
        ],
        "tasks": tasks,
    }
    (folder / "play.yml").write_text(json.dumps([book]))
    given = {"gpu_topology_plan": {"groups": [PAIR]}, **variables}
    return run_playbook(
        folder,
        *("-i", "localhost,", "-e", json.dumps(given), *arguments, folder / "play.yml"),
        ANSIBLE_LIBRARY=str(ROOT / "roles/model_store/library"),
    )


def run_playbook(folder, *arguments, **environment):
    """ansible-playbook on this machine, its own files in the folder; returns the finished process."""
    return subprocess.run(
        [find_playbook(), *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
        env={
            **os.environ,
            "ANSIBLE_NOCOLOR": "1",
            "ANSIBLE_HOME": str(folder / "home"),
            **environment,
        },
    )


def preflight_of(name):
    """The task that asks a role to refuse its variables."""
    return [{"ansible.builtin.include_tasks": str(ROOT / f"roles/{name}/tasks/preflight.yml")}]


def program(folder, name, text):
    """A stand-in for a program of the host."""
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
