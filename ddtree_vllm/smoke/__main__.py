# SPDX-License-Identifier: Apache-2.0
"""Runs the comparison; the package says what it is."""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import ddtree_vllm.smoke
from ddtree_vllm import checkpoints, environment
from ddtree_vllm.smoke import container, remote
from ddtree_vllm.smoke.prompts import PROMPTS, SEEDED_PROMPTS
from ddtree_vllm.smoke.report import (
    Contestant,
    Progress,
    Result,
    complaints,
    identical,
    table,
)
from ddtree_vllm.smoke.server import MODEL_NAME, Server, ServerError, running_server

CHAIN_BUDGET = 15
MAX_MODEL_LEN = 512
SEEDED_MAX_TOKENS = 16
SEED = 1234


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the comparison; returns 0 when all engines agree and the tree beats the chain."""
    args = _parser().parse_args(argv)
    if args.server not in ("local", "image"):
        args.output.mkdir(parents=True, exist_ok=True)
        return remote.run(
            args.server,
            PROMPTS,
            report_to=str(args.output / "smoke.json"),
            max_tokens=args.max_tokens,
            exact=args.exact,
            min_acceptance=args.min_acceptance,
        )
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    args.output.mkdir(parents=True, exist_ok=True)
    report_path = args.output / "smoke.json"
    report_path.unlink(missing_ok=True)
    started = time.monotonic()
    try:
        report, results = _compare(args)
    except ServerError as error:
        print(f"\nsmoke: {error}", file=sys.stderr)
        return 1
    report_path.write_text(json.dumps(report, indent=2) + "\n")
    print(f"\n{table(_contestants(args), results)}\n")
    print(f"{report_path} written; {time.monotonic() - started:.0f} s in all")
    wrong = complaints(_contestants(args), results)
    for sentence in wrong:
        print(f"smoke: {sentence}", file=sys.stderr)
    if not wrong:
        print("smoke: passed, every token the same")
    return 1 if wrong else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m ddtree_vllm.smoke",
        description=ddtree_vllm.smoke.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--server",
        default="local",
        metavar="local|image|URL",
        help="servers of this environment, of --image in containers, or one that runs already",
    )
    parser.add_argument("--target", default="demo/target")
    parser.add_argument("--drafter", default="demo/drafter")
    parser.add_argument("--budget", type=int, default=31, help="nodes of the tree (default 31)")
    parser.add_argument("--max-tokens", type=int, default=40, help="of each greedy completion")
    parser.add_argument("--dtype", help="default: float32 on the CPU, auto on a GPU")
    parser.add_argument("--output", type=Path, default=Path("build"), help="reports and logs")
    parser.add_argument("--ready-timeout", type=float, default=300, metavar="SECONDS")
    image = parser.add_argument_group("--server image")
    image.add_argument("--image", default="ddtree-vllm:cpu", help="default ddtree-vllm:cpu")
    image.add_argument("--docker", default="", help="docker or podman; default: the one there is")
    running = parser.add_argument_group("--server URL, with the API key in VLLM_API_KEY")
    running.add_argument(
        "--exact", action="store_true", help="tokens do not depend on the batch (float32)"
    )
    running.add_argument(
        "--min-acceptance", type=float, default=0.0, metavar="X", help="least tokens a step"
    )
    return parser


def _contestants(args: argparse.Namespace) -> tuple[Contestant, ...]:
    drafter = ("--drafter", args.drafter)
    return (
        Contestant("ar", "no speculation", ("--no-speculation",)),
        Contestant(
            "chain",
            f"chain of {CHAIN_BUDGET}",
            (*drafter, "--policy", "chain", "--budget", str(CHAIN_BUDGET)),
        ),
        Contestant("ddtree", f"tree of {args.budget}", (*drafter, "--budget", str(args.budget))),
    )


def _compare(args: argparse.Namespace) -> tuple[dict, dict[str, Result]]:
    for role, path in (("target", args.target), ("drafter", args.drafter)):
        try:
            checkpoints.open_checkpoint(role, path)
        except ValueError as error:
            raise ServerError(str(error)) from None
    if args.server == "image":
        vllm = container.image_vllm(container.engine(args.docker), args.image)
    else:
        installed = environment.installed_vllm()
        if len(installed) != 1:
            raise ServerError("needs exactly one vLLM; `ddtree-vllm doctor` says what is installed")
        vllm = installed[0]
    dtype = args.dtype or ("float32" if vllm.device == "cpu" else "auto")
    # A server takes most of a GPU's memory, so there they run one after another. Without a GPU all
    # start at once: starting is half of the time and leaves cores idle.
    contestants = _contestants(args)
    rounds = [contestants] if vllm.device == "cpu" else [(one,) for one in contestants]
    results: dict[str, Result] = {}
    for together in rounds:
        results |= _run(together, args, dtype)
    report = {
        "vllm": vllm.version,
        "device": vllm.device,
        "prompts": len(PROMPTS),
        "identical_greedy": identical(results, "greedy"),
        "identical_seeded": identical(results, "seeded"),
        "ar": {"tokens_per_step": 1.0},
        "chain": {"tokens_per_step": round(results["chain"].tokens_per_step, 4)},
        "ddtree": {
            "budget": args.budget,
            "tokens_per_step": round(results["ddtree"].tokens_per_step, 4),
        },
    }
    return report, results


def _run(together: Sequence[Contestant], args: argparse.Namespace, dtype: str) -> dict[str, Result]:
    """Starts these contestants at once, then sends each in turn all prompts; stops them."""
    with contextlib.ExitStack() as stack:
        began = time.monotonic()
        servers = {
            contestant.key: stack.enter_context(
                running_server(
                    lambda port: _command(contestant, args, dtype, port),  # noqa: B023 - called at once
                    args.output / f"smoke-{contestant.key}.log",
                )
            )
            for contestant in together
        }
        results = {contestant.key: Result() for contestant in together}
        with Progress("starting") as progress:
            for contestant in together:
                servers[contestant.key].wait_until_ready(
                    args.ready_timeout,
                    lambda: progress.say(", ".join(one.title for one in together)),
                )
                results[contestant.key].start_s = time.monotonic() - began
        for contestant in together:
            with Progress(contestant.title) as progress:
                _ask(servers[contestant.key], contestant, args, results[contestant.key], progress)
    return results


def _ask(
    server: Server,
    contestant: Contestant,
    args: argparse.Namespace,
    result: Result,
    progress: Progress,
) -> None:
    """Sends one contestant all prompts."""
    progress.say(f"{len(PROMPTS)} prompts at once, greedy")
    began = time.monotonic()
    result.greedy = server.complete(PROMPTS, max_tokens=args.max_tokens, temperature=0.0)
    result.greedy_s = time.monotonic() - began
    if contestant.key != "ar":
        result.tokens_per_step = server.tokens_per_step()
    progress.say(f"{len(SEEDED_PROMPTS)} prompts, sampled with a seed")
    result.seeded = server.complete(
        SEEDED_PROMPTS, max_tokens=SEEDED_MAX_TOKENS, temperature=1.0, seed=SEED
    )
    progress.say(f"greedy part {result.greedy_s:.1f} s, {result.tokens_per_step:.2f} tokens a step")


def _command(contestant: Contestant, args: argparse.Namespace, dtype: str, port: int) -> list[str]:
    options = contestant.options
    if args.server == "image":
        start = container.serve_command(
            container.engine(args.docker), args.image, port, args.target, args.drafter
        )
        options = tuple(container.DRAFTER if word == args.drafter else word for word in options)
    else:
        start = [*_serve_command(args.target), "--host", "127.0.0.1", "--port", str(port)]
    return [
        *start,
        *options,
        *("--served-model-name", MODEL_NAME),
        *("--dtype", dtype),
        *("--max-model-len", str(MAX_MODEL_LEN)),
        *("--max-num-seqs", str(len(PROMPTS))),
    ]


def _serve_command(target: str) -> list[str]:
    script = Path(sys.executable).with_name("ddtree-vllm")
    if script.exists():
        return [str(script), "serve", target]
    return [sys.executable, "-m", "ddtree_vllm.cli", "serve", target]


if __name__ == "__main__":
    sys.exit(main())
