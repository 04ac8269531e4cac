# SPDX-License-Identifier: Apache-2.0
"""Which GPUs serve together, and why.

`plan` is a pure function from what is known of a host to groups of GPUs, one vLLM instance each.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

from . import cpulist, links, switches
from .errors import TopologyError
from .inventory import Gpu, main_kind, unfit
from .matrix import Matrix
from .mesh import degraded
from .partition import MOST_GPUS, Partition, best_partition

# What Qwen3.6-27B can be cut into: its 4 KV heads are shared out, or repeated evenly.
SIZES = (1, 2, 4, 8)
OBJECTIVES = ("latency", "throughput")
P2P_CHOICES = ("auto", "on", "off")
# vLLM's own --gpu-memory-utilization.
MEMORY_UTILIZATION = 0.92
FIRST_PORT = 8000
CACHE_ROOT = "/var/cache/ddtree-vllm"
DEVICE_ORDER = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}

# How far apart the GPUs of a group are, best last. A link that `topo -m` calls SYS leaves the root
# complex, yet between GPUs of one NUMA node it does not cross sockets.
_APART = (
    "linked across NUMA nodes",
    "linked by SYS inside one NUMA node",
    "linked by PCIe inside one socket",
    "linked by NVLink",
)


def plan(
    matrix: Matrix,
    gpus: Sequence[Gpu] = (),
    *,
    tensor_parallel: int = 0,
    objective: str = "latency",
    model_memory_mib: int = 0,
    memory_utilization: float = MEMORY_UTILIZATION,
    p2p: str = "auto",
    peer_status: Sequence[Sequence[str]] | None = None,
    verdict: Mapping[str, Any] | None = None,
    redirects: Sequence[Mapping[str, Any]] = (),
    allow_degraded: bool = False,
    first_port: int = FIRST_PORT,
    cache_root: str = CACHE_ROOT,
    driver: str = "",
    firmware: str = "",
) -> dict[str, Any]:
    """Groups GPUs into instances of one tensor-parallel size.

    Args:
        matrix: links and affinities.
        gpus: the inventory, one per GPU of the matrix; empty if only the matrix is known.
        tensor_parallel: 1, 2, 4 or 8 GPUs an instance; 0 chooses.
        objective: "latency" (the largest groups that stay as well linked as the best pair) or
            "throughput" (the smallest that hold the model, for the most replicas).
        model_memory_mib: memory of weights and the least useful KV cache, all GPUs of an instance
            together; 0 if unknown.
        memory_utilization: part of a GPU's memory that vLLM may use.
        p2p: "auto", or "on" / "off" to overrule probe and driver.
        peer_status: `matrix.parse_p2p`, if asked.
        verdict: what `ddtree-topology probe` wrote, if it ran.
        redirects: `acs.peer_redirects`, if looked for.
        allow_degraded: keep GPUs that lost NVLinks.
        first_port: port of the first instance; the next one gets the next port.
        cache_root: directory of the instances' cache directories.
        driver, firmware: versions, part of what a verdict is good for.

    Returns:
        A mapping of plain values (it survives JSON): gpus, groups, excluded, warnings, why,
        choices, tensor_parallel, objective, p2p, acs, fingerprint. docs/topology.md describes each.

    Raises:
        TopologyError: no honest plan exists.
    """
    _check_request(tensor_parallel, objective, model_memory_mib, memory_utilization, p2p)
    _check_port(first_port)
    warnings = list(matrix.warnings)
    gpus = _complete(matrix, gpus, warnings)
    if peer_status is not None and len(peer_status) != matrix.count:
        raise TopologyError(
            f"the matrix shows {matrix.count} GPUs and the one of peer access {len(peer_status)}: "
            "they are of different hosts, or of different days"
        )
    why: list[str] = []
    excluded = _exclude(matrix, gpus, allow_degraded, warnings)
    members = [gpu for gpu in gpus if gpu.index not in excluded]
    if not members:
        raise TopologyError("no GPU may serve: " + _excluded_text(excluded))
    why.append(
        f"{len(members)} of {len(gpus)} GPU{'s' if len(gpus) > 1 else ''} may serve "
        f"({members[0].kind_text})."
        + (f" Excluded: {_excluded_text(excluded)}." if excluded else "")
    )

    choices = _choices(matrix, members, model_memory_mib, memory_utilization)
    size = _choose(
        choices,
        len(members),
        tensor_parallel=tensor_parallel,
        objective=objective,
        excluded=excluded,
        why=why,
        warnings=warnings,
    )
    best: Partition = choices[size]["partition"]
    for index in best.idle:
        made = f"{len(best.groups)} group{'s' if len(best.groups) > 1 else ''}"
        excluded[index] = f"left over: {len(members)} GPUs make {made} of {size}"
    if model_memory_mib == 0:
        warnings.append("model_memory_mib is not given: whether the model fits was not checked.")
    elif not members[0].memory_mib:
        warnings.append("The GPUs' memory is unknown: whether the model fits was not checked.")

    pairs = [pair for group in best.groups for pair in combinations(group, 2)]
    fingerprint = {
        "groups": [[gpus[i].uuid or str(i) for i in group] for group in best.groups],
        "driver": driver,
        "firmware": firmware,
    }
    decision, notes = switches.decide(
        p2p,
        pairs,
        matrix.links,
        peer_status=peer_status,
        verdict=verdict,
        fingerprint=fingerprint,
    )
    warnings += notes
    why.append(decision.because)
    acs = [
        dict(item)
        for item in redirects
        if tuple(item["pair"]) in pairs and not links.nvlinks(_link(matrix, item["pair"]))
    ]
    warnings += [_acs_text(item) for item in acs]

    groups = [
        _group(
            number,
            group,
            gpus=gpus,
            matrix=matrix,
            p2p=decision.on,
            memory_utilization=memory_utilization,
            warnings=warnings,
        )
        for number, group in enumerate(best.groups)
    ]
    for number, group in enumerate(groups):
        group["port"] = first_port + number
        group["cache_dir"] = f"{cache_root.rstrip('/')}/{number}"
        group["cache_key"] = _digest([fingerprint["groups"][number], driver, firmware])
    return {
        "gpus": {str(gpu.index): _describe(gpu, matrix) for gpu in gpus},
        "groups": groups,
        "excluded": {str(index): excluded[index] for index in sorted(excluded)},
        "warnings": warnings,
        "why": why,
        "choices": [_choice_text(number, choice) for number, choice in choices.items()],
        "tensor_parallel": size,
        "objective": objective,
        "p2p": decision._asdict(),
        "acs": acs,
        "fingerprint": fingerprint,
    }


def plan_cpu(
    cpus: str,
    nodes: str,
    *,
    first_port: int = FIRST_PORT,
    cache_root: str = CACHE_ROOT,
) -> dict[str, Any]:
    """One instance on a host without GPUs, in the form of `plan`.

    Args:
        cpus, nodes: CPUs and memory nodes that are online, as Linux lists.

    Raises:
        TopologyError: there is no such port.
    """
    _check_port(first_port)
    group = {
        "instance": "0",
        "gpus": [],
        "uuids": [],
        "tensor_parallel": 1,
        "worst_link": None,
        "cpuset": cpus or None,
        "memory_node": nodes or None,
        "env": {},
        "nccl_env": {},
        "engine_args": ["--tensor-parallel-size", "1"],
        "port": first_port,
        "cache_dir": f"{cache_root.rstrip('/')}/0",
        "cache_key": _digest(["cpu", cpus, nodes]),
    }
    return {
        "gpus": {},
        "groups": [group],
        "excluded": {},
        "warnings": [],
        "why": ["The host serves from its CPUs because cpu_only was asked for."],
        "choices": [],
        "tensor_parallel": 1,
        "objective": "latency",
        "p2p": {"on": False, "probed": False, "because": switches.NO_PAIRS},
        "acs": [],
        "fingerprint": {"groups": [], "driver": "", "firmware": ""},
    }


def _check_port(first_port: int) -> None:
    if not 1 <= first_port <= 65535 - MOST_GPUS:
        raise TopologyError(f"first_port is 1 to {65535 - MOST_GPUS}, not {first_port}")


def _check_request(
    tensor_parallel: int, objective: str, model_memory_mib: int, utilization: float, p2p: str
) -> None:
    if tensor_parallel not in (0, *SIZES):
        raise TopologyError(f"tensor_parallel is 0 (choose), 1, 2, 4 or 8, not {tensor_parallel}")
    if objective not in OBJECTIVES:
        raise TopologyError(f"objective is latency or throughput, not {objective!r}")
    if p2p not in P2P_CHOICES:
        raise TopologyError(f"p2p is auto, on or off, not {p2p!r}")
    if model_memory_mib < 0:
        raise TopologyError(f"model_memory_mib is 0 (unknown) or more, not {model_memory_mib}")
    if not 0 < utilization <= 1:
        raise TopologyError(f"memory_utilization is above 0 and at most 1, not {utilization}")


def _complete(matrix: Matrix, gpus: Sequence[Gpu], warnings: list[str]) -> list[Gpu]:
    """The inventory, made up of bare indices where only a matrix was given."""
    if not gpus:
        warnings.append(
            "Only the matrix is known: names, memory, MIG, foreign processes and UUIDs were not "
            "checked."
        )
        gpus = [Gpu(index) for index in range(matrix.count)]
    if len(gpus) != matrix.count:
        raise TopologyError(
            f"the matrix shows {matrix.count} GPUs and the inventory lists {len(gpus)}: one of "
            "them is old, or a GPU fell off the bus between the two"
        )
    if len(gpus) > MOST_GPUS:
        raise TopologyError(f"{len(gpus)} GPUs are more than the {MOST_GPUS} that can be planned")
    addresses = [gpu.pci_bus_id.lower() for gpu in gpus if gpu.pci_bus_id]
    if addresses != sorted(addresses):
        raise TopologyError(
            "the GPUs given are not in the order of their PCI addresses, which is nvidia-smi's: "
            "their indices cannot be those of the matrix"
        )
    return list(gpus)


def _exclude(
    matrix: Matrix, gpus: Sequence[Gpu], allow_degraded: bool, warnings: list[str]
) -> dict[int, str]:
    excluded = unfit(gpus)
    candidates = [gpu for gpu in gpus if gpu.index not in excluded]
    if not candidates:
        return excluded
    kind = main_kind(candidates)
    same = [gpu for gpu in gpus if gpu.kind == kind]
    for gpu in candidates:
        if gpu.kind != kind:
            excluded[gpu.index] = f"other hardware ({gpu.kind_text}) than the GPUs that serve"
    # Busy GPUs still witness the mesh; under MIG NVLink is off and tells nothing.
    witnesses = [gpu.index for gpu in same if not gpu.mig]
    for index, reason in degraded(matrix.links, witnesses).items():
        warnings.append(f"GPU{index} is degraded: {reason}.")
        if not allow_degraded:
            excluded[index] = "; ".join(filter(None, (excluded.get(index), reason)))
    return excluded


def _excluded_text(excluded: Mapping[int, str]) -> str:
    return "; ".join(f"GPU{index} ({excluded[index]})" for index in sorted(excluded))


def _choices(
    matrix: Matrix, members: Sequence[Gpu], model_memory_mib: int, utilization: float
) -> dict[int, dict[str, Any]]:
    """For each possible size: its best division, how far apart its GPUs are, whether it fits."""
    by_index = {gpu.index: gpu for gpu in members}
    numa = {index: _numa(gpu, matrix) for index, gpu in by_index.items()}
    memory = min((gpu.memory_mib or 0) for gpu in members)
    usable = int(memory * utilization)
    choices: dict[int, dict[str, Any]] = {}
    for size in SIZES:
        if size > len(members):
            break
        best = best_partition(
            list(by_index), size, lambda i, j: links.rank(matrix.links[i][j]), numa
        )
        need = -(-model_memory_mib // size)
        choices[size] = {
            "partition": best,
            "apart": min((_apart(group, matrix, numa) for group in best.groups), default=0),
            "divides": not best.idle,
            "need": need,
            "usable": usable,
            "fits": not memory or need <= usable,
            "why": "",
        }
    return choices


def _apart(group: Sequence[int], matrix: Matrix, numa: Mapping[int, Sequence[int] | None]) -> int:
    """Index into _APART; groups of one count as NVLink."""
    table = [matrix.links[i][j] for i, j in combinations(group, 2)]
    if all(links.nvlinks(link) for link in table):
        return 3
    if "SYS" not in table:
        return 2
    places = {numa[i] for i in group}
    return 1 if len(places) == 1 and None not in places else 0


def _choose(
    choices: dict[int, dict[str, Any]],
    count: int,
    *,
    tensor_parallel: int,
    objective: str,
    excluded: Mapping[int, str],
    why: list[str],
    warnings: list[str],
) -> int:
    """The size; leaves the reason for it and against each other size in `choices`."""
    for choice in choices.values():
        if not choice["fits"]:
            choice["why"] = (
                f"the model needs {choice['need']} MiB a GPU and {choice['usable']} MiB are usable"
            )
    if tensor_parallel:
        _check_wanted(choices, count, tensor_parallel, excluded)
        for size, choice in choices.items():
            choice["why"] = "asked for" if size == tensor_parallel else "not asked for"
        why.append(f"TP {tensor_parallel} was asked for.")
        return tensor_parallel

    fitting = [size for size, choice in choices.items() if choice["fits"]]
    if not fitting:
        last = max(choices)
        raise TopologyError(
            f"the model does not fit: even over {last} GPUs it needs {choices[last]['need']} MiB a "
            f"GPU, and {choices[last]['usable']} MiB are usable"
        )
    # If no fitting size divides the GPUs, some stay idle whatever is done.
    allowed = [size for size in fitting if choices[size]["divides"]] or fitting
    size, reason = _pick(choices, allowed, objective)
    why.append(f"TP {size} for {objective}: {reason}.")
    for other, choice in choices.items():
        if other == size:
            choice["why"] = reason
        elif choice["fits"] and other not in allowed:
            choice["why"] = f"does not divide {count} GPUs"
        elif choice["fits"] and objective == "throughput":
            choice["why"] = "fewer replicas"
        elif choice["fits"] and other < size:
            choice["why"] = "a request is served faster by more GPUs"
        elif choice["fits"]:
            choice["why"] = f"a group would be {_APART[choice['apart']]}"
    larger = [other for other in fitting if other > size and other not in allowed]
    if larger and objective == "latency":
        idle = len(choices[larger[-1]]["partition"].idle)
        warnings.append(
            f"{count} GPUs are not a multiple of {larger[-1]}: tensor_parallel={larger[-1]} would "
            f"serve a request faster and leave {idle} GPU{'s' if idle > 1 else ''} idle."
        )
    return size


def _pick(
    choices: Mapping[int, Mapping[str, Any]], allowed: Sequence[int], objective: str
) -> tuple[int, str]:
    """The size for an objective, and the reason as a phrase."""
    if objective == "throughput":
        return allowed[0], "the smallest size that fits, for the most replicas"
    shared = [choices[size]["apart"] for size in allowed if size > 1]
    if not shared:
        return 1, "no larger size is possible"
    # A larger group is worth it until its links are of a worse sort than a smaller group's.
    nearest = max(shared)
    size = max(size for size in allowed if size > 1 and choices[size]["apart"] == nearest)
    return size, f"the largest size whose groups are all {_APART[nearest]}"


def _check_wanted(
    choices: Mapping[int, Mapping[str, Any]], count: int, wanted: int, excluded: Mapping[int, str]
) -> None:
    if wanted not in choices:
        raise TopologyError(
            f"tensor_parallel={wanted} needs {wanted} GPUs that are alike and free; there "
            f"{'is' if count == 1 else 'are'} {count}"
            + (f". Excluded: {_excluded_text(excluded)}" if excluded else "")
        )
    if not choices[wanted]["fits"]:
        fits = [str(size) for size, choice in choices.items() if choice["fits"]]
        advice = f"tensor_parallel={fits[0]} would do" if fits else "no size on this host would do"
        raise TopologyError(
            f"the model does not fit at tensor_parallel={wanted}: {choices[wanted]['why']}; "
            f"{advice}"
        )


def _group(
    number: int,
    members: Sequence[int],
    *,
    gpus: Sequence[Gpu],
    matrix: Matrix,
    p2p: bool,
    memory_utilization: float,
    warnings: list[str],
) -> dict[str, Any]:
    ranks = [links.rank(matrix.links[i][j]) for i, j in combinations(members, 2)]
    cpus = [_cpus(gpus[i], matrix) for i in members]
    nodes = [_numa(gpus[i], matrix) for i in members]
    nccl, vllm, arguments = switches.switches(p2p, len(members))
    if None in cpus or None in nodes:
        missing = [
            what for what, known in (("CPUs", cpus), ("memory nodes", nodes)) if None in known
        ]
        warnings.append(
            f"Group {number} ({', '.join(f'GPU{i}' for i in members)}) is not pinned in full: the "
            f"{' and '.join(missing)} near its GPUs are not known; on the host itself sysfs tells."
        )
    return {
        "instance": str(number),
        "gpus": list(members),
        "uuids": [gpus[i].uuid for i in members if gpus[i].uuid],
        "tensor_parallel": len(members),
        "worst_link": links.link_of(min(ranks)) if ranks else None,
        "cpuset": _union([cpulist.parse(item) if item else None for item in cpus]),
        "memory_node": _union(nodes),
        "env": {**DEVICE_ORDER, **vllm},
        "nccl_env": nccl,
        "engine_args": [
            "--tensor-parallel-size",
            str(len(members)),
            "--gpu-memory-utilization",
            f"{memory_utilization:g}",
            *arguments,
        ],
    }


def _union(sets: Sequence[Sequence[int] | frozenset[int] | None]) -> str | None:
    """The union as a Linux list, None if any set is unknown: half a pin is worse than none."""
    members: set[int] = set()
    for item in sets:
        if item is None:
            return None
        members.update(item)
    return cpulist.format_list(members)


def _cpus(gpu: Gpu, matrix: Matrix) -> str | None:
    return gpu.cpus or matrix.cpus[gpu.index]


def _numa(gpu: Gpu, matrix: Matrix) -> tuple[int, ...] | None:
    return gpu.numa or matrix.numa[gpu.index]


def _link(matrix: Matrix, pair: Sequence[int]) -> str:
    return matrix.links[pair[0]][pair[1]]


def _describe(gpu: Gpu, matrix: Matrix) -> dict[str, Any]:
    numa = _numa(gpu, matrix)
    return {
        "links": list(matrix.links[gpu.index]),
        "cpus": _cpus(gpu, matrix),
        "numa": list(numa) if numa else None,
        "name": gpu.name or None,
        "uuid": gpu.uuid or None,
        "memory_mib": gpu.memory_mib,
        "pci_bus_id": gpu.pci_bus_id or None,
    }


def _choice_text(size: int, choice: Mapping[str, Any]) -> dict[str, Any]:
    best: Partition = choice["partition"]
    return {
        "tensor_parallel": size,
        "groups": len(best.groups),
        "idle": len(best.idle),
        "worst_link": links.link_of(best.worst) if best.worst else None,
        "why": choice["why"],
    }


def _acs_text(item: Mapping[str, Any]) -> str:
    i, j = item["pair"]
    return (
        f"ACS at {', '.join(item['bridges'])} sends traffic between GPU{i} and GPU{j} through an "
        "IOMMU that translates: collectives over P2P can hang there."
    )


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]
