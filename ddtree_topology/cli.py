# SPDX-License-Identifier: Apache-2.0
"""`ddtree-topology plan` and `ddtree-topology probe`.

Exit status of plan: 0 a plan, 2 a refusal. Of probe: 0 P2P works, 1 only without P2P, 2 nothing
works or nothing could be probed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

from . import host, picture
from .errors import TopologyError
from .inventory import gpus_from
from .matrix import parse_matrix, parse_p2p
from .planner import (
    CACHE_ROOT,
    FIRST_PORT,
    MEMORY_UTILIZATION,
    OBJECTIVES,
    P2P_CHOICES,
    SIZES,
    plan_cpu,
)
from .probe import TIMEOUT_S, probe


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    try:
        return int(options.run(options))
    except TopologyError as error:
        if options.json:
            print(json.dumps({"refused": str(error)}))
        print(f"ddtree-topology: refused: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        # The reader has gone (`| head`); nothing is left to tell it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ddtree-topology",
        description="Plans which GPUs of a host serve together, and proves that they talk.",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    planning = commands.add_parser("plan", help="group the GPUs into instances")
    _add_request(planning)
    planning.add_argument(
        "--picture",
        nargs="?",
        const="topology.svg",
        metavar="FILE.svg",
        help="print the matrix with its groups and write it as SVG (default: topology.svg)",
    )
    planning.add_argument("--color", choices=("auto", "always", "never"), default="auto")
    planning.set_defaults(run=_run_plan)

    probing = commands.add_parser("probe", help="run a checked all-reduce over each group")
    _add_request(probing)
    probing.add_argument("--plan", metavar="FILE", help="probe this plan instead of making one")
    probing.add_argument("--backend", choices=("nccl", "gloo"), default="nccl")
    probing.add_argument(
        "--python", default=sys.executable, help="an interpreter that has torch (default: this one)"
    )
    probing.add_argument(
        "--timeout",
        type=float,
        default=TIMEOUT_S,
        metavar="S",
        help="limit of one round (default: %(default)g); there are at most two",
    )
    probing.add_argument(
        "--most-elements", type=int, default=0, help="largest all-reduce, float32 elements"
    )
    probing.add_argument("--output", metavar="FILE", help="also write the verdict here")
    probing.set_defaults(run=_run_probe)
    return parser


def _add_request(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--matrix", metavar="FILE", help="output of `nvidia-smi topo -m`, - for stdin"
    )
    parser.add_argument(
        "--gpus",
        metavar="FILE",
        help="JSON list of {name, uuid, memory_mib, mig, pci_bus_id, busy} (default: ask, or "
        "unknown if --matrix is given)",
    )
    parser.add_argument("--p2p-matrix", metavar="FILE", help="output of `nvidia-smi topo -p2p r`")
    parser.add_argument("--verdict", metavar="FILE", help="what `ddtree-topology probe` wrote")
    parser.add_argument(
        "--tensor-parallel",
        type=int,
        default=0,
        metavar="N",
        help=f"GPUs of an instance: {', '.join(map(str, SIZES))}, or 0 to choose (default)",
    )
    parser.add_argument("--objective", choices=OBJECTIVES, default="latency")
    parser.add_argument(
        "--model-memory-mib",
        type=int,
        default=0,
        metavar="MIB",
        help="memory of weights and the least KV cache, all GPUs of an instance together",
    )
    parser.add_argument("--memory-utilization", type=float, default=MEMORY_UTILIZATION)
    parser.add_argument("--p2p", choices=P2P_CHOICES, default="auto")
    parser.add_argument("--allow-degraded", action="store_true", help="keep GPUs that lost NVLinks")
    parser.add_argument("--cpu-only", action="store_true", help="one instance, no GPU")
    parser.add_argument(
        "--own-cgroup",
        action="append",
        metavar="NAME",
        help="processes in a control group of this name are ours "
        f"(default: {', '.join(host.OWN_CGROUPS)})",
    )
    parser.add_argument("--first-port", type=int, default=FIRST_PORT)
    parser.add_argument("--cache-root", default=CACHE_ROOT)
    parser.add_argument("--json", action="store_true")


def _run_plan(options: argparse.Namespace) -> int:
    if options.picture and not options.picture.lower().endswith(".svg"):
        raise TopologyError(
            f"the picture is an SVG: name a file that ends in .svg, not {options.picture}"
        )
    made = _plan(options)
    if options.picture:
        _write(options.picture, picture.svg(made))
    if options.json:
        print(json.dumps(made, indent=2))
        return 0
    colour = options.color == "always" or (
        options.color == "auto" and sys.stdout.isatty() and "NO_COLOR" not in os.environ
    )
    print(picture.table(made, colour), end="")
    if options.picture:
        print(f"wrote {options.picture}")
    return 0


def _run_probe(options: argparse.Namespace) -> int:
    made = _json(options.plan, dict) if options.plan else _plan(options)
    verdict = probe(
        made,
        backend=options.backend,
        python=options.python,
        timeout_s=options.timeout,
        most_elements=options.most_elements,
    )
    text = json.dumps(verdict, indent=2)
    if options.output:
        _write(options.output, text + "\n")
    if options.json:
        print(text)
    else:
        print(verdict["because"])
        for group in verdict["groups"]:
            for part, result in (("on", group["with_p2p"]), ("off", group["without_p2p"])):
                if result and result["detail"]:
                    print(f"--- GPUs {group['gpus']}, P2P {part}: {result['meaning']}")
                    print(result["detail"])
    if not verdict["collectives"]:
        return 2
    return 0 if verdict["p2p"] or options.backend == "gloo" else 1


def _plan(options: argparse.Namespace) -> dict[str, Any]:
    if options.cpu_only:
        cpus, nodes = host.online()
        return plan_cpu(cpus, nodes, first_port=options.first_port, cache_root=options.cache_root)
    peer_status = parse_p2p(_read(options.p2p_matrix)) if options.p2p_matrix else None
    if options.matrix:
        gpus = gpus_from(_json(options.gpus, list)) if options.gpus else []
        found = host.Host(parse_matrix(_read(options.matrix)), tuple(gpus), peer_status=peer_status)
    elif options.gpus or options.p2p_matrix:
        raise TopologyError("--gpus and --p2p-matrix describe another host: give --matrix as well")
    else:
        found = host.read_host(own_cgroups=options.own_cgroup or host.OWN_CGROUPS)
    return host.plan_host(
        found,
        tensor_parallel=options.tensor_parallel,
        objective=options.objective,
        model_memory_mib=options.model_memory_mib,
        memory_utilization=options.memory_utilization,
        p2p=options.p2p,
        verdict=_json(options.verdict, dict) if options.verdict else None,
        allow_degraded=options.allow_degraded,
        first_port=options.first_port,
        cache_root=options.cache_root,
    )


def _read(path: str) -> str:
    try:
        if path == "-":
            return sys.stdin.read()
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError as error:
        raise TopologyError(f"{path} cannot be read: {error.strerror}") from None


def _json(path: str, kind: type) -> Any:
    try:
        value = json.loads(_read(path))
    except ValueError as error:
        raise TopologyError(f"{path} is not JSON: {error}") from None
    if not isinstance(value, kind):
        raise TopologyError(f"{path} is not a JSON {'list' if kind is list else 'object'}")
    return value


def _write(path: str, text: str) -> None:
    """Replaces a file in one step: a reader sees the old text or the new one."""
    folder = os.path.dirname(os.path.abspath(path))
    try:
        handle, temporary = tempfile.mkstemp(dir=folder, prefix=".ddtree-")
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            os.fchmod(file.fileno(), 0o644)
        os.replace(temporary, path)
    except OSError as error:
        raise TopologyError(f"{path} cannot be written: {error.strerror}") from None
