# SPDX-License-Identifier: Apache-2.0
"""`ddtree-entrypoint [serve [MODEL]] [options]`, other commands of the image, and its health check."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import sys
from collections.abc import MutableMapping, Sequence
from pathlib import Path

from . import ContainerError, checks, settings, supervise

DEVICE = Path("/opt/ddtree/device")
# Of a health check, which Docker ends after 30 s: at most four looks and a completion.
LOOK_S, GENERATE_S = 5, 8
# How long an engine that hangs while idle stays unnoticed.
GENERATE_EVERY_S = 60
# Run as they are.
COMMANDS = ("ddtree-health", "ddtree-topology", "python3", "sh", "bash")
USAGE = """\
This image serves a model with draft trees:

  docker run IMAGE [options]                   the model that variables name, or the demo pair
  docker run IMAGE serve MODEL [options]       MODEL, with its drafter behind --drafter
  docker run IMAGE doctor                      what is installed, and whether it works
  docker exec CONTAINER /opt/ddtree/bin/ddtree-entrypoint cuda     whether a container still has its GPUs
  docker run IMAGE ddtree-health | ddtree-topology | python3 | sh | bash

Options are those of `ddtree-vllm serve` and of vLLM. Variables, where no option says otherwise:
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code. 2 is a wrong call, or something that has to be there and is not."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        return _run(words, os.environ)
    except ContainerError as error:
        supervise.say(str(error))
        # Docker keeps 2 of a health check for itself.
        return 1 if words == ["healthcheck"] else 2


def _run(words: list[str], environment: MutableMapping[str, str]) -> int:
    if words == ["healthcheck"]:
        return _healthcheck(environment)
    if words == ["cuda"]:
        _check_device()
        return 0
    kind, rest = classify(words)
    if kind == "help":
        print(USAGE + "\n".join(f"  {name:<28} {text}" for name, text in _variables()), flush=True)
        return 0
    if kind == "run":
        # Python ignores it, and a shell could not give it back: `yes | head` would complain.
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        os.execvp(rest[0], rest)
    try:
        with supervise.stoppable():
            wanted = settings.serve(rest, environment)
            _check(wanted, environment)
            drain = wanted.number("--shutdown-timeout", 0)
            mask = supervise.hold_signals()
    except supervise.StopRequest as stop:
        supervise.say(f"{signal.Signals(stop.number).name} before the server was started")
        return 128 + stop.number
    for name in (*settings.OPTIONS, *settings.OTHERS):
        environment.pop(name, None)
    return supervise.run(
        wanted.command, environment, f"requests in flight have {drain} s to finish", mask
    )


def _check(wanted: settings.Serve, environment: MutableMapping[str, str]) -> None:
    """Everything that has to hold before weights are loaded."""
    said = checks.prepare_folders(environment)
    if said:
        supervise.say(said)
    _read_api_key(environment)
    checks.check_shm(wanted.number("--tensor-parallel-size", 1))
    wanted.port  # noqa: B018 - raises
    if _has_cuda():
        checks.check_cuda()


def _has_cuda() -> bool:
    return DEVICE.read_text(encoding="ascii").strip() == "cuda"


def _check_device() -> None:
    """In a container that runs: a reload of systemd on its host can take the GPUs from it."""
    if not _has_cuda():
        raise ContainerError("this image serves without a GPU")
    checks.check_cuda()


def classify(words: list[str]) -> tuple[str, list[str]]:
    """("serve", what stands behind it), ("run", a command) or ("help", nothing)."""
    if words[:1] == ["ddtree-vllm"]:
        words = words[1:]
    if words and words[0] in ("-h", "--help", "help"):
        return "help", []
    if words[:1] == ["serve"]:
        return ("help", []) if words[1:2] in (["-h"], ["--help"]) else _serve(words[1:])
    if not words or (words[0].startswith("-") and words[0] != "--version"):
        return _serve(words)
    if words[0] in ("doctor", "--version"):
        return "run", ["ddtree-vllm", *words]
    if words[0] in COMMANDS:
        return "run", words
    raise ContainerError(
        f"{words[0]!r} is no command of this image: options come first, or serve MODEL, doctor, "
        f"{', '.join(COMMANDS)}; --help says more"
    )


def _serve(words: list[str]) -> tuple[str, list[str]]:
    """Help among the options is a command that ends, and no server: nobody has to ask it to."""
    if not settings.asks_for_help(words):
        return "serve", words
    groups = [word for word in words if word.startswith("--help=")]
    # vLLM's own options come in groups, --help=GROUP.
    return "run", ["vllm", "serve", groups[0]] if groups else ["ddtree-vllm", "serve", "--help"]


def _variables() -> list[tuple[str, str]]:
    return [
        ("DDTREE_MODEL", "checkpoint folder or name on Hugging Face"),
        ("DDTREE_DRAFTER", "its DFlash drafter, likewise"),
        ("DDTREE_SPECULATION", "on (default), or off: the model alone"),
        *((name, option) for name, option in settings.OPTIONS.items()),
        ("DDTREE_API_KEY_FILE", "file that holds the API key of /v1"),
        ("DDTREE_ARGS", "more options, as a shell would split them"),
    ]


def _read_api_key(environment: MutableMapping[str, str]) -> None:
    path = environment.get("DDTREE_API_KEY_FILE", "")
    if not path:
        return
    try:
        key = Path(path).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ContainerError(f"DDTREE_API_KEY_FILE={path} cannot be read: {error}") from None
    if not key:
        raise ContainerError(f"DDTREE_API_KEY_FILE={path} is empty")
    if not (key.isascii() and key.isprintable()):
        raise ContainerError(
            f"DDTREE_API_KEY_FILE={path} holds no API key: write one line of ASCII characters"
        )
    environment["VLLM_API_KEY"] = key


def _healthcheck(environment: MutableMapping[str, str]) -> int:
    """Docker's HEALTHCHECK: 0 or 1; Docker keeps 2, which ddtree-health says of a hung engine, for itself.

    A completion that failed is no reason by itself: a busy server is late with it, one that drains turns
    it away, and a model without text knows none. One without any answer starts the clock of `live`.
    """
    from ddtree_health.cli import main as health

    wanted = _served(environment)
    folder, _ = checks.temporary_folder(environment)
    state = os.path.join(folder, "ddtree-healthcheck.json")
    if wanted.url.startswith("https:"):
        import ssl

        # The container asks itself, by an address that its certificate does not name.
        ssl._create_default_https_context = ssl._create_unverified_context  # type: ignore[assignment]
    call = ["check", "--json", "--url", wanted.url, "--state", state, "--timeout", str(LOOK_S)]
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        status = health([*call, *_questions(wanted, environment)])
    if not said.getvalue():
        return 1  # a wrong call, which it has told
    results = json.loads(said.getvalue())["checks"]
    for name, result in results.items():
        print(f"{name:<9}  {result['status']:<7}  {result['because']}")
    failed = [name for name, result in results.items() if result["status"] == "fail"]
    return 0 if failed == ["generates"] else min(status, 1)


def _questions(wanted: settings.Serve, environment: MutableMapping[str, str]) -> list[str]:
    """ddtree-health's options for what is asked: no completion where the server's key is not in a file."""
    path = environment.get("DDTREE_API_KEY_FILE", "")
    known = os.access(path, os.R_OK) if path else not environment.get("VLLM_API_KEY")
    # The option counts more than the file.
    if wanted.value("--api-key") is not None or not known:
        return ["--checks", "live,ready"]
    return [
        *("--checks", "live,ready,generates", "--generate-every", str(GENERATE_EVERY_S)),
        *("--generate-timeout", str(GENERATE_S), "--api-key-file", path),
    ]


def _served(environment: MutableMapping[str, str]) -> settings.Serve:
    """What PID 1 was asked to serve: a health check is started with its variables, without its arguments."""
    words = Path("/proc/1/cmdline").read_bytes().decode(errors="replace").split("\0")[:-1]
    ours = [i for i, word in enumerate(words) if word.endswith("/ddtree-entrypoint")]
    if not ours:
        raise ContainerError(
            f"this container does not serve: its first process is {' '.join(words[:3]) or 'another'}"
        )
    kind, rest = classify(words[ours[-1] + 1 :])
    if kind != "serve":
        raise ContainerError("this container does not serve")
    return settings.serve(rest, environment)
