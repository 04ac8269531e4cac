# SPDX-License-Identifier: Apache-2.0
"""`ddtree-health [check]`, `... kill-hung`, `... tell`, `... wait-ready` and `... wait-free`.

Exit status of a check: 0 healthy, 1 unhealthy, 2 hung (a restart is the remedy), 64 a wrong call.
Of kill-hung: 0 killed or not the judged one any more, 1 neither. Of tell: 0 nothing is left to be
told, 1 something is. Of a wait: 0 done, 1 not in time.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from typing import Any, NoReturn

from . import alerts, drafts, generates, gpu, live, state, unit, waiting
from .errors import HealthError
from .report import CHECKS, FAIL, HEALTHY, PASS, UNHEALTHY, UNKNOWN, USAGE, Report, Result
from .server import STEPS, Answer, Sample, Server

COMMANDS = ("check", "kill-hung", "tell", "wait-ready", "wait-free")
DEFAULT_PROMPT = "The capital of France is"


class _Parser(argparse.ArgumentParser):
    """argparse ends wrong calls with 2, which here means hung."""

    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        self.exit(USAGE, f"{self.prog}: {message}\n")


def main(arguments: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words or words[0] not in (*COMMANDS, "-h", "--help"):
        words.insert(0, "check")
    options = _parser().parse_args(words)
    try:
        status = int(options.run(options))
        sys.stdout.flush()
    except HealthError as error:
        print(f"ddtree-health: {error}", file=sys.stderr)
        return int(options.error_status)
    except BrokenPipeError:
        # Whoever read has read enough. Python would flush once more at its end, and complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    return status


def _parser() -> _Parser:
    parser = _Parser(
        prog="ddtree-health",
        description="Says whether a vLLM engine is alive, ready, generating and drafting, and "
        "whether its GPUs are well.",
        epilog="check is the default command. Exit status: 0 healthy, 1 unhealthy, 2 hung, "
        "64 wrong call.",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND", parser_class=_Parser)
    checking = commands.add_parser("check", help="run the checks once (default)")
    _add_server(checking)
    checking.add_argument(
        "--checks",
        type=_checks,
        default=list(CHECKS),
        metavar="LIST",
        help=f"which, by comma (default {','.join(CHECKS)})",
    )
    checking.add_argument("--instance", default="", help="name in reports and metrics")
    checking.add_argument("--unit", default="", help="the engine's systemd unit")
    checking.add_argument("--state", default="", metavar="FILE", help="keeps the last look")
    checking.add_argument(
        "--textfile", default="", metavar="FILE", help="write metrics here, for node_exporter"
    )
    checking.add_argument(
        "--alerts",
        default="",
        metavar="FILE",
        help="keeps which failures last, for `ddtree-health tell`; needs --unit",
    )
    checking.add_argument(
        "--alert-after",
        type=_seconds,
        default=60.0,
        metavar="S",
        help="a check that fails for this long is told (default 60)",
    )
    checking.add_argument("--json", action="store_true")
    checking.add_argument(
        "--timeout", type=_seconds, default=10.0, metavar="S", help="of a look (default 10)"
    )
    checking.add_argument(
        "--stall-after",
        type=_seconds,
        default=60.0,
        metavar="S",
        help="unanswered work without progress for this long is a hang (default 60)",
    )
    checking.add_argument(
        "--interval",
        type=_seconds,
        default=2.0,
        metavar="S",
        help="between two looks of one run, if there is no other way to see progress (default 2)",
    )
    checking.add_argument("--prompt", default=DEFAULT_PROMPT, help="what the completion continues")
    checking.add_argument("--expect", default="", help="text that the continuation contains")
    checking.add_argument("--max-tokens", type=int, default=8)
    checking.add_argument("--model", default="", help="default: the first one served")
    checking.add_argument(
        "--generate-timeout", type=_seconds, default=30.0, metavar="S", help="default 30"
    )
    checking.add_argument(
        "--generate-every",
        type=_seconds,
        default=0.0,
        metavar="S",
        help="a passed completion is good for this long (default 0: ask in each run)",
    )
    checking.add_argument(
        "--min-acceptance",
        type=float,
        default=0.0,
        metavar="X",
        help="floor of the acceptance length 1 + accepted / drafts (default 0: none)",
    )
    checking.add_argument("--gpus", type=_list, default=[], metavar="UUIDS", help="by comma")
    checking.add_argument("--xid-window", type=int, default=3600, metavar="S")
    checking.set_defaults(run=_run_check, error_status=USAGE)

    killing = commands.add_parser(
        "kill-hung", help="kill every process of the start that the last check has judged"
    )
    killing.add_argument("--unit", required=True, help="the engine's systemd unit")
    killing.add_argument(
        "--state", required=True, metavar="FILE", help="of the check that found it hung"
    )
    killing.set_defaults(run=_run_kill_hung, error_status=UNHEALTHY)

    telling = commands.add_parser(
        "tell", help="tell the journal, and a program, of failures that last and of their end"
    )
    telling.add_argument("--unit", required=True, help="the engine's systemd unit")
    telling.add_argument(
        "--alerts", required=True, metavar="FILE", help="that the check has written"
    )
    telling.add_argument(
        "command",
        nargs="*",
        metavar="-- COMMAND",
        help="program and arguments to run; the unit and a sentence are added",
    )
    telling.set_defaults(run=_run_tell, error_status=UNHEALTHY)

    ready = commands.add_parser("wait-ready", help="wait for the first 200 of /health")
    _add_server(ready)
    ready.add_argument("--pid", type=int, help="give up when this process ends")
    ready.add_argument("--timeout", type=_seconds, default=600.0, metavar="S")
    ready.set_defaults(run=_run_wait_ready, error_status=UNHEALTHY)

    free = commands.add_parser("wait-free", help="wait for a free port and free GPU memory")
    free.add_argument("--host", default="0.0.0.0", help="address that the server will bind")
    free.add_argument("--port", type=_port, default=0)
    free.add_argument("--gpus", type=_list, default=[], metavar="UUIDS", help="by comma")
    free.add_argument("--free-mib", type=int, default=0, help="on each GPU")
    free.add_argument(
        "--indices",
        type=_indices,
        default=[],
        metavar="LIST",
        help="by comma: the index that each of --gpus has to have",
    )
    free.add_argument("--timeout", type=_seconds, default=60.0, metavar="S")
    free.set_defaults(run=_run_wait_free, error_status=UNHEALTHY)
    return parser


def _add_server(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--api-key-file", default="", metavar="FILE")


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is no length of time")
    return value


def _port(text: str) -> int:
    value = int(text)
    if not 0 <= value <= 65535:
        raise argparse.ArgumentTypeError(f"{text} is no port")
    return value


def _list(text: str) -> list[str]:
    return [word for word in text.split(",") if word]


def _indices(text: str) -> list[int]:
    return [int(word) for word in _list(text)]


def _checks(text: str) -> list[str]:
    words = _list(text)
    unknown = sorted(set(words) - set(CHECKS))
    if unknown or not words:
        raise argparse.ArgumentTypeError(f"{text!r}: choose from {', '.join(CHECKS)}")
    return [name for name in CHECKS if name in words]


def _api_key(path: str) -> str:
    if not path:
        return ""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            key = file.read().strip()
    except OSError as error:
        raise HealthError(f"{path} cannot be read: {error.strerror}") from None
    if not (key.isascii() and key.isprintable()):
        raise HealthError(f"{path} holds no API key: one is a line of ASCII characters")
    return key


def _run_wait_ready(options: argparse.Namespace) -> int:
    server = Server(options.url, api_key=_api_key(options.api_key_file))
    took = waiting.until_ready(server, timeout_s=options.timeout, pid=options.pid)
    print(f"the engine is ready after {took:.0f} s")
    return 0


def _run_wait_free(options: argparse.Namespace) -> int:
    if options.indices and len(options.indices) != len(options.gpus):
        raise HealthError("--indices needs as many entries as --gpus")
    waiting.until_free(
        host=options.host,
        port=options.port,
        uuids=options.gpus,
        free_mib=options.free_mib,
        indices=options.indices,
        timeout_s=options.timeout,
    )
    return 0


def _run_check(options: argparse.Namespace) -> int:
    if options.alerts and not options.unit:
        raise HealthError("--alerts needs --unit: while the engine starts nothing is told")
    report, start, kept = _check(options)
    if options.alerts:
        known = alerts.judge(
            state.read(options.alerts),
            report,
            start=start,
            now=time.monotonic(),
            after_s=options.alert_after,
        )
        kept = _keep(options.alerts, json.dumps(known, indent=1) + "\n") and kept
    print(report.as_json() if options.json else report.as_text())
    if options.textfile:
        kept = _keep(options.textfile, report.as_metrics()) and kept
    return max(report.exit_status, HEALTHY if kept else UNHEALTHY)


def _keep(path: str, text: str) -> bool:
    """Writes a file; a full disk is told, and hides no hang."""
    try:
        state.write(path, text)
    except HealthError as error:
        print(f"ddtree-health: {error}", file=sys.stderr)
        return False
    return True


def _run_kill_hung(options: argparse.Namespace) -> int:
    """Kills a unit; its Restart= starts it again, its start limit included.

    A hung engine drains nothing, so there is no reason to wait for its stop timeout. One that was
    started after the judgement is another engine, which is loading, and is left alone.
    """
    judged = state.judged_invocation(options.state)
    if not judged:
        raise HealthError(f"{options.state} names no start of {options.unit}: nothing is killed")
    found = unit.read(options.unit)
    if found.invocation != judged:
        print(f"{found.name} has been started anew since it was judged: it is left alone")
        return 0
    unit.run_command(["systemctl", "kill", "--signal=SIGKILL", found.name])
    print(f"{found.name} was killed")
    return 0


def _run_tell(options: argparse.Namespace) -> int:
    """Tells what the last check left to be told; what could not be told is tried after the next."""
    known = state.read(options.alerts)
    pending = known.get("pending") or []
    if not pending or not alerts.can_be_told(pending):
        return 0  # a damaged file is begun anew by the next check

    def keep(left: list[list[str]]) -> None:
        try:
            state.write(options.alerts, json.dumps({**known, "pending": left}, indent=1) + "\n")
        except HealthError:
            # On a full disk: better forgotten than told after every check.
            with contextlib.suppress(OSError):
                os.unlink(options.alerts)
            raise

    alerts.tell(options.unit, pending, options.command, keep)
    return 0


def _check(options: argparse.Namespace) -> tuple[Report, str, bool]:
    """The report, the start that it is of, and whether what the next run needs could be kept.

    The start is systemd's name of it: empty while the unit does not count as started, or without one.
    """
    kept = True
    wanted = options.checks
    server = Server(options.url, options.timeout, _api_key(options.api_key_file))
    found = unit.read(options.unit) if options.unit else None
    invocation = found.invocation if found is not None and found.active == "active" else ""
    results: dict[str, Result] = {}
    if found is not None and found.active != "active":
        for result in _not_active(found):
            results[result.check] = result
    else:
        incarnation = f"{state.boot_id()} {invocation or options.url}"
        saved = state.load(options.state, incarnation)
        after = _look(options, server, saved, results)
        if found is not None and "live" in results:
            results["live"].data["restarts"] = found.restarts
        if options.state:
            text = json.dumps(
                {"incarnation": incarnation, "invocation": invocation, **after}, indent=1
            )
            kept = _keep(options.state, text + "\n")
    if "gpu" in wanted:
        results["gpu"] = gpu.check(options.gpus, xid_window_s=options.xid_window)
    chosen = tuple(results[name] for name in CHECKS if name in results and name in wanted)
    return Report(options.instance, chosen, time.time()), invocation, kept


def _not_active(found: unit.Unit) -> list[Result]:
    """Results for an engine that systemd does not count as started."""
    if found.active in ("activating", "reloading"):
        why = f"{found.name} is starting ({found.sub})"
        return [
            Result("live", UNKNOWN, why, {"restarts": found.restarts}),
            Result("ready", FAIL, why),
        ]
    why = f"{found.name} is {found.active} ({found.result or found.sub})"
    return [Result("live", FAIL, why, {"restarts": found.restarts}), Result("ready", FAIL, why)]


def _look(
    options: argparse.Namespace,
    server: Server,
    saved: dict[str, Any],
    results: dict[str, Result],
) -> dict[str, Any]:
    """Looks at the server and fills in `results`; returns the state for the next run."""
    clock = live.Clock.from_state(saved)
    health = server.get("/health")
    samples = [server.sample()]
    dead = health.status == 503
    after: dict[str, Any] = {"asked": saved.get("asked"), "drafts": saved.get("drafts") or {}}
    unanswered = None
    now = time.monotonic()
    if "generates" in options.checks:
        fresh = saved.get("asked") is not None and now - saved["asked"] < options.generate_every
        # A clock that runs is a suspicion: a completion settles it.
        if fresh and clock.since is None:
            results["generates"] = Result(
                "generates", PASS, f"a completion passed {now - saved['asked']:.0f} s ago"
            )
        elif health.refused or dead or (health.silent and samples[0].metrics is None):
            results["generates"] = Result("generates", FAIL, "the server takes no requests")
        else:
            unanswered, result = _generate(options, server, samples)
            results["generates"] = result
            after["asked"] = now if result.status == PASS else None
    if len(samples) == 1 and clock.counters is None and samples[0].work:
        time.sleep(options.interval)
        samples.append(server.sample())
    results["live"], clock = live.judge(
        clock,
        samples,
        stall_after_s=options.stall_after,
        unanswered_since=unanswered,
        engine_dead=dead,
    )
    after["clock"] = clock.as_state()
    results["ready"] = _ready(health, results["live"])
    last = samples[-1]
    if last.metrics is None:
        results["drafts"] = Result("drafts", UNKNOWN, "the counters are not to be had")
    else:
        results["drafts"], after["drafts"] = drafts.judge(
            after["drafts"], last, options.min_acceptance
        )
    return after


def _generate(
    options: argparse.Namespace, server: Server, samples: list[Sample]
) -> tuple[float | None, Result]:
    """Asks for a completion and looks again; also returns when an unanswered one was sent."""
    question = generates.Question(
        prompt=options.prompt,
        expect=options.expect,
        max_tokens=options.max_tokens,
        timeout_s=options.generate_timeout,
        model=options.model,
    )
    sent = time.monotonic()
    answer = generates.ask(server, question)
    samples.append(server.sample())
    steps = samples[-1].value(STEPS) - samples[0].value(STEPS)
    return (sent if answer.silent else None), generates.judge(question, answer, max(steps, 0.0))


def _ready(health: Answer, lives: Result) -> Result:
    """Ready: /health answers 200, or is slow while the engine makes steps."""
    data = {"health_seconds": round(health.seconds, 3)}
    if health.status == 200:
        return Result("ready", PASS, f"/health answered 200 in {health.seconds:.2f} s", data)
    if not health.silent:
        return Result("ready", FAIL, f"/health answered {health.status}", data)
    if lives.status == PASS and lives.data.get("progress") and not health.refused:
        return Result("ready", PASS, f"busy: {health.body}, but the engine makes steps", data)
    return Result("ready", FAIL, health.body, data)
