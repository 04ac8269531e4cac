#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
"""Ansible module host_preflight: everything that would keep a host from serving, at once."""

from __future__ import annotations

import os
import platform

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.ddtree_health import gpu as health_gpu
from ansible.module_utils.ddtree_health.errors import HealthError
from ansible.module_utils.ddtree_preflight import checks, driver
from ansible.module_utils.ddtree_preflight.host import Host
from ansible.module_utils.ddtree_preflight.request import request_from

DOCUMENTATION = r"""
module: host_preflight
short_description: Find everything that would keep a host from serving
description:
  - Reads files, asks commands and initialises CUDA in a process of its own. Changes nothing, and
    does the same in check mode.
  - Does not fail because of what it finds, so that what other tasks find can be added.
requirements:
  - Python 3.9 on the host, and nothing else.
options:
  cpu_only:
    description: The host is meant to have no GPU.
    type: bool
    default: false
  mode:
    description: How the engine is run.
    type: str
    default: native
    choices: [native, container]
  python:
    description: Interpreter that native mode makes its venv with.
    type: str
    default: python3
  venv:
    description: Venv of native mode.
    type: path
    default: /opt/ddtree/venv
  installs_venv:
    description: A later role makes the venv. If not, it has to be there with the right vLLM.
    type: bool
    default: true
  tensor_parallel:
    description: GPUs of an instance as planned. V(0) is no plan.
    type: int
    default: 0
  shm_mib:
    description: Size of a container's C(/dev/shm).
    type: int
    default: 16384
  ports:
    description: Ports of the instances, and the unit that may hold each.
    type: list
    elements: dict
    default: []
    suboptions:
      port:
        description: Its number.
        type: int
      unit:
        description: A systemd unit of ours.
        type: str
  gpu_free_mib:
    description: Memory to be free on each planned GPU that no instance of ours uses. V(0) does not look.
    type: int
    default: 0
  planned_gpus:
    description: UUIDs of the planned GPUs. Without any, every GPU counts.
    type: list
    elements: str
    default: []
  memory_mib:
    description: Least main memory.
    type: int
    default: 4096
  cpus:
    description: Least number of CPUs.
    type: int
    default: 2
  disk:
    description: Room that is needed. What is on one file system adds up.
    type: list
    elements: dict
    default: []
    suboptions:
      path:
        description: Directory, which need not be there yet.
        type: path
      mib:
        description: How much.
        type: int
      what:
        description: For what.
        type: str
      model:
        description: As in C(model_store_models), where it is one.
        type: dict
      record:
        description:
          - What ddtree-models noted of a model; if that is O(disk[].model), no room is needed.
          - Of an image what the role vllm_service noted of those that it loaded.
        type: path
      partial:
        description: Folder of an interrupted fetch, whose size counts.
        type: path
      made:
        description: Path that is there once it is made, so that no room is needed.
        type: path
      image:
        description: Name of an image. If Docker has it as O(disk[].digest), no room is needed.
        type: str
      digest:
        description: What an archive calls that image, "" if it does not tell.
        type: str
      docker:
        description: Docker says where, and O(disk[].path) is where it does not answer.
        type: bool
  checkpoints:
    description: What is to be served.
    type: list
    elements: dict
    default: []
    suboptions:
      path:
        description: Folder.
        type: str
      what:
        description: The variable that names it.
        type: str
      comes:
        description: A role before the service brings it.
        type: bool
  image:
    description: Image of container mode.
    type: str
    default: ""
  image_archive:
    description: It is loaded from an archive of the controller.
    type: bool
    default: false
  docker:
    description: Docker's client.
    type: str
    default: docker
  controller_time:
    description: Seconds since the epoch on the controller. V(0) does not compare.
    type: float
    default: 0
  max_skew_s:
    description: How far the clocks may be apart.
    type: int
    default: 60
  driver_min:
    description: Oldest driver.
    type: str
    default: "580"
  vllm_version:
    description: What a venv that is taken as it is has to have.
    type: str
    default: 0.32.0
  installs_driver:
    description: A later role installs the driver, so that its absence only warns.
    type: bool
    default: false
  starts_fabric_manager:
    description: A later role starts the fabric manager, so that a stopped one only warns.
    type: bool
    default: false
  cuda_timeout_s:
    description: Limit of CUDA's initialisation.
    type: int
    default: 60
attributes:
  check_mode:
    support: full
    description: Reads only.
  diff_mode:
    support: none
    description: Changes nothing.
author:
  - The ddtree-vllm authors
"""

EXAMPLES = r"""
- name: Look at the host
  host_preflight:
    controller_time: "{{ now(utc=true).timestamp() }}"
    disk:
      - {path: /srv/ddtree/models, mib: 57000, what: models}
  register: looked

- name: Refuse it
  ansible.builtin.fail:
    msg: "{{ looked.findings | selectattr('level', 'equalto', 'refuse') | map(attribute='sentence') }}"
  when: looked.findings | selectattr('level', 'equalto', 'refuse') | list | length > 0
"""

RETURN = r"""
findings:
  description: One entry per finding, with check, level (refuse, warn, pass) and sentence.
  returned: success
  type: list
  elements: dict
host:
  description: Name, kernel, CPUs and NVIDIA driver (loaded, installed) of the host.
  returned: success
  type: dict
"""

ARGUMENTS = {
    "cpu_only": {"type": "bool", "default": False},
    "mode": {"type": "str", "default": "native", "choices": ["native", "container"]},
    "python": {"type": "str", "default": "python3"},
    "venv": {"type": "path", "default": "/opt/ddtree/venv"},
    "installs_venv": {"type": "bool", "default": True},
    "tensor_parallel": {"type": "int", "default": 0},
    "shm_mib": {"type": "int", "default": 16384},
    "ports": {
        "type": "list",
        "elements": "dict",
        "default": [],
        "options": {"port": {"type": "int"}, "unit": {"type": "str"}},
    },
    "gpu_free_mib": {"type": "int", "default": 0},
    "planned_gpus": {"type": "list", "elements": "str", "default": []},
    "memory_mib": {"type": "int", "default": 4096},
    "cpus": {"type": "int", "default": 2},
    "disk": {
        "type": "list",
        "elements": "dict",
        "default": [],
        "options": {
            "path": {"type": "path"},
            "mib": {"type": "int"},
            "what": {"type": "str"},
            "model": {"type": "dict"},
            "record": {"type": "path"},
            "partial": {"type": "path"},
            "made": {"type": "path"},
            "image": {"type": "str"},
            "digest": {"type": "str"},
            "docker": {"type": "bool"},
        },
    },
    "checkpoints": {
        "type": "list",
        "elements": "dict",
        "default": [],
        "options": {"path": {"type": "str"}, "what": {"type": "str"}, "comes": {"type": "bool"}},
    },
    "image": {"type": "str", "default": ""},
    "image_archive": {"type": "bool", "default": False},
    "docker": {"type": "str", "default": "docker"},
    "controller_time": {"type": "float", "default": 0},
    "max_skew_s": {"type": "int", "default": 60},
    "driver_min": {"type": "str", "default": "580"},
    "vllm_version": {"type": "str", "default": "0.32.0"},
    "installs_driver": {"type": "bool", "default": False},
    "starts_fabric_manager": {"type": "bool", "default": False},
    "cuda_timeout_s": {"type": "int", "default": 60},
}


def gpu_faults(text):
    """Faults of each GPU by bus address, by the code that watches the GPUs later."""
    try:
        return {bus: health_gpu.faults(values) for bus, values in health_gpu.parse(text).items()}
    except HealthError:
        return {}


def main():
    module = AnsibleModule(argument_spec=ARGUMENTS, supports_check_mode=True)
    host = Host()
    findings = checks.run(request_from(module.params), host, gpu_faults)
    found = driver.look(host)
    module.exit_json(
        changed=False,
        findings=[finding.__dict__ for finding in findings],
        host={
            "name": platform.node(),
            "kernel": platform.release(),
            "cpus": os.cpu_count(),
            "driver": {"loaded": found.loaded, "installed": found.installed},
        },
    )


if __name__ == "__main__":
    main()
