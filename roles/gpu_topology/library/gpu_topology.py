#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
"""Ansible module gpu_topology: plans which GPUs of a host serve together."""

from __future__ import annotations

import json
import os

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.ddtree_topology.errors import TopologyError
from ansible.module_utils.ddtree_topology.host import (
    Host,
    online,
    plan_host,
    read_gpus,
    read_host,
    run_command,
)
from ansible.module_utils.ddtree_topology.inventory import gpus_from
from ansible.module_utils.ddtree_topology.matrix import parse_matrix, parse_p2p
from ansible.module_utils.ddtree_topology.planner import plan_cpu

DOCUMENTATION = r"""
module: gpu_topology
short_description: Plan which GPUs of a host serve together
description:
  - Reads C(nvidia-smi topo -m), C(nvidia-smi topo -p2p r), C(nvidia-smi --query-gpu) and sysfs, and
    groups the GPUs into instances of one tensor-parallel size.
  - Reads only. It never reports a change, and does the same in check mode.
  - Fails with one sentence if no honest plan exists.
requirements:
  - Python 3.9 on the host, and nothing else.
options:
  matrix:
    description:
      - Output of C(nvidia-smi topo -m). Asked for if left out.
    type: str
  gpus:
    description:
      - Inventory to use instead of asking nvidia-smi, in the order of nvidia-smi. Needs O(matrix).
      - With O(matrix) and without O(gpus), names, memory, MIG and foreign processes stay unknown
        unless O(ask_host) is true.
    type: list
    elements: dict
    suboptions:
      index:
        description: Number in nvidia-smi. The position in the list if left out.
        type: int
      name:
        description: Product name.
        type: str
      uuid:
        description: UUID, as nvidia-smi writes it.
        type: str
      memory_mib:
        description: Total memory, MiB.
        type: int
      mig:
        description: MIG mode is on.
        type: raw
      pci_bus_id:
        description: PCI address.
        type: str
      busy:
        description: True, or the name of the process that uses the GPU and is not ours.
        type: raw
      cpus:
        description: Local CPUs, as a Linux list. Taken from the matrix if left out.
        type: str
      numa:
        description: Memory nodes, as a Linux list. Taken from the matrix if left out.
        type: str
  ask_host:
    description:
      - With O(matrix), still ask nvidia-smi for the inventory.
    type: bool
    default: false
  tensor_parallel:
    description:
      - GPUs of one instance. V(0) chooses.
    type: int
    default: 0
    choices: [0, 1, 2, 4, 8]
  objective:
    description:
      - What V(0) of O(tensor_parallel) chooses for. V(latency) takes the largest groups that stay
        as well linked as the best pair, V(throughput) the smallest that hold the model.
    type: str
    default: latency
    choices: [latency, throughput]
  model_memory_mib:
    description:
      - Memory of the weights and the least useful KV cache, all GPUs of an instance together.
        V(0) is unknown.
    type: int
    default: 0
  memory_utilization:
    description:
      - Part of a GPU's memory that vLLM may use.
    type: float
    default: 0.92
  p2p:
    description:
      - V(auto) follows the probe's verdict, then the driver, then the links. V(on) and V(off)
        overrule them.
    type: str
    default: auto
    choices: [auto, 'on', 'off']
  p2p_matrix:
    description:
      - Output of C(nvidia-smi topo -p2p r). Asked for if O(matrix) is left out too.
    type: str
  verdict_file:
    description:
      - File on the host that C(ddtree-topology probe) wrote. A missing file is no verdict.
    type: path
  allow_degraded:
    description:
      - Keep GPUs that lost NVLinks.
    type: bool
    default: false
  cpu_only:
    description:
      - Plan one instance without a GPU.
    type: bool
    default: false
  own_cgroups:
    description:
      - Processes in a control group with one of these names do not make a GPU busy.
    type: list
    elements: str
    default: [ddtree-vllm]
  first_port:
    description:
      - Port of the first instance. The next one gets the next port.
    type: int
    default: 8000
  cache_root:
    description:
      - Directory of the instances' cache directories.
    type: str
    default: /var/cache/ddtree-vllm
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
- name: Plan for the lowest latency
  gpu_topology:
    model_memory_mib: 62000
  register: topology

- name: Show why
  ansible.builtin.debug:
    var: topology.why

- name: Plan another host from its matrix
  gpu_topology:
    matrix: "{{ lookup('ansible.builtin.file', 'topo.txt') }}"
    objective: throughput
"""

RETURN = r"""
gpus:
  description: By index, each GPU's link row, CPUs, NUMA nodes, name, UUID, memory and PCI address.
  returned: success
  type: dict
groups:
  description:
    - One entry per instance, with instance, gpus, uuids, tensor_parallel, worst_link, cpuset,
      memory_node, env, nccl_env, engine_args, port, cache_dir and cache_key.
  returned: success
  type: list
  elements: dict
excluded:
  description: By index, why a GPU does not serve.
  returned: success
  type: dict
notes:
  description:
    - What could not be checked or needs attention. Ansible shows and returns them as warnings too.
  returned: success
  type: list
  elements: str
why:
  description: How the plan was chosen, as sentences.
  returned: success
  type: list
  elements: str
choices:
  description:
    - Each size that was possible, with its groups, its worst link and the reason for or against.
  returned: success
  type: list
  elements: dict
tensor_parallel:
  description: GPUs of an instance.
  returned: success
  type: int
p2p:
  description:
    - on, probed (a verdict covers these groups) and because. One decision for all groups.
  returned: success
  type: dict
acs:
  description:
    - Pairs of GPUs in one group whose traffic PCIe bridges send through a translating IOMMU.
  returned: success
  type: list
  elements: dict
fingerprint:
  description: What a verdict is good for; the groups, the driver and the firmware.
  returned: success
  type: dict
"""

ARGUMENTS = {
    "matrix": {"type": "str"},
    "gpus": {
        "type": "list",
        "elements": "dict",
        "options": {
            "index": {"type": "int"},
            "name": {"type": "str"},
            "uuid": {"type": "str"},
            "memory_mib": {"type": "int"},
            "mig": {"type": "raw"},
            "pci_bus_id": {"type": "str"},
            "busy": {"type": "raw"},
            "cpus": {"type": "str"},
            "numa": {"type": "str"},
        },
    },
    "ask_host": {"type": "bool", "default": False},
    "tensor_parallel": {"type": "int", "default": 0, "choices": [0, 1, 2, 4, 8]},
    "objective": {"type": "str", "default": "latency", "choices": ["latency", "throughput"]},
    "model_memory_mib": {"type": "int", "default": 0},
    "memory_utilization": {"type": "float", "default": 0.92},
    "p2p": {"type": "str", "default": "auto", "choices": ["auto", "on", "off"]},
    "p2p_matrix": {"type": "str"},
    "verdict_file": {"type": "path"},
    "allow_degraded": {"type": "bool", "default": False},
    "cpu_only": {"type": "bool", "default": False},
    "own_cgroups": {"type": "list", "elements": "str", "default": ["ddtree-vllm"]},
    "first_port": {"type": "int", "default": 8000},
    "cache_root": {"type": "str", "default": "/var/cache/ddtree-vllm"},
}


def find_host(params):
    """The host as the parameters describe it, or as it describes itself."""
    if not params["matrix"]:
        if params["gpus"]:
            raise TopologyError("gpus describes another host: give its matrix as well")
        return read_host(own_cgroups=params["own_cgroups"])
    peer_status = parse_p2p(params["p2p_matrix"]) if params["p2p_matrix"] else None
    if params["gpus"]:
        # Ansible fills in every suboption; None is unknown here too.
        gpus = gpus_from(
            [{key: item[key] for key in item if item[key] is not None} for item in params["gpus"]]
        )
    elif params["ask_host"]:
        gpus = read_gpus(run_command, own_cgroups=params["own_cgroups"])
    else:
        gpus = []
    return Host(parse_matrix(params["matrix"]), tuple(gpus), peer_status=peer_status)


def read_verdict(path):
    """The probe's verdict, None where there is none."""
    if not path or not os.path.exists(path):
        return None
    try:
        with open(path, encoding="utf-8") as file:
            return json.load(file)
    except (OSError, ValueError) as error:
        raise TopologyError(
            f"the verdict {path} cannot be read ({error}): remove it, or probe again"
        ) from None


def make_plan(params):
    common = {"first_port": params["first_port"], "cache_root": params["cache_root"]}
    if params["cpu_only"]:
        return plan_cpu(*online(), **common)
    keys = ("tensor_parallel", "objective", "model_memory_mib", "memory_utilization", "p2p")
    return plan_host(
        find_host(params),
        verdict=read_verdict(params["verdict_file"]),
        allow_degraded=params["allow_degraded"],
        **{key: params[key] for key in keys},
        **common,
    )


def main():
    module = AnsibleModule(
        argument_spec=ARGUMENTS,
        supports_check_mode=True,
        mutually_exclusive=[("gpus", "ask_host")],
    )
    try:
        result = make_plan(module.params)
    except TopologyError as error:
        module.fail_json(msg=f"GPU topology refused: {error}.")
    # Ansible owns the result's key "warnings" and fills it from warn().
    result["notes"] = result.pop("warnings")
    for note in result["notes"]:
        module.warn(note)
    module.exit_json(changed=False, **result)


if __name__ == "__main__":
    main()
