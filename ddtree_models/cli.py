# SPDX-License-Identifier: Apache-2.0
"""`ddtree-models fetch`, `ddtree-models check` and `ddtree-models remove NAME`.

Exit status: 0 as wanted, 1 refused or failed, 3 of `check`: has to be fetched.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import time
from collections.abc import Sequence

from .errors import ModelsError
from .fetch import fetch
from .sources import source_of
from .store import State, Store
from .wanted import Config, Model, read_config

CONFIG = "/etc/ddtree/models.json"
TO_FETCH = 3


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    try:
        return int(options.run(options, read_config(options.config)))
    except ModelsError as error:
        print(f"ddtree-models: {error}.", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"ddtree-models: {error.filename or 'a file'}: {error.strerror}.", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ddtree-models",
        description="Brings checkpoints onto this host and proves that they are what was asked for.",
        epilog="Exit status: 0 as wanted, 1 refused or failed, 3 of check: has to be fetched.",
    )
    parser.add_argument(
        "--config", default=CONFIG, metavar="FILE", help=f"which models (default {CONFIG})"
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    fetching = commands.add_parser(
        "fetch",
        help="fetch what is missing or corrupted; a token is the systemd credential hf-token",
    )
    fetching.set_defaults(run=_fetch)
    checking = commands.add_parser(
        "check", help="compare with what was verified; reads what changed since"
    )
    checking.add_argument("--full", action="store_true", help="read every file")
    checking.add_argument(
        "--installed",
        action="store_true",
        help="accept what was fetched last, though another revision is configured by now",
    )
    checking.add_argument(
        "--used-by",
        default="",
        metavar="COMMAND_LINE",
        help="only the models whose folder this names; without it --installed passes over models "
        "that are yet to be fetched",
    )
    checking.add_argument("--json", action="store_true")
    checking.set_defaults(run=_check)
    removing = commands.add_parser("remove", help="remove a model and what is noted of it")
    which = removing.add_mutually_exclusive_group(required=True)
    which.add_argument("name", nargs="?")
    which.add_argument(
        "--all", action="store_true", help="all that were fetched, also those no longer configured"
    )
    removing.set_defaults(run=_remove)
    return parser


def _token() -> str:
    """The credential that systemd hands over; "" without one. Never an argument, never printed."""
    folder = os.environ.get("CREDENTIALS_DIRECTORY")
    path = os.path.join(folder, "hf-token") if folder else ""
    if not path or not os.path.exists(path):
        return ""
    with open(path, encoding="utf-8") as file:
        return file.read().strip()


def _say(sentence: str) -> None:
    print(sentence, file=sys.stderr, flush=True)


def _fetch(options: argparse.Namespace, config: Config) -> int:
    store, token = Store(config), _token()
    for model in config.models:
        state = store.check(model)
        if state.good:
            _say(f"{model.name}: is here, verified")
            continue
        for fault in state.faults:
            _say(fault)
        fetch(store, model, source_of(model, config, token), config, _say)
    return 0


def _check(options: argparse.Namespace, config: Config) -> int:
    store = Store(config)
    began = time.monotonic()
    models: Sequence[Model] = config.models
    if options.used_by:
        models = store.used(models, _words(options.used_by))
    elif options.installed:
        models = [model for model in models if store.present(model)]
    states = [store.check(model, options.full, options.installed) for model in models]
    seconds = time.monotonic() - began
    if options.json:
        print(
            json.dumps(
                {
                    "models": [
                        {
                            "name": state.name,
                            "missing": state.missing,
                            "faults": state.faults,
                            "read": state.read,
                        }
                        for state in states
                    ]
                }
            )
        )
    else:
        for state in states:
            _tell(state, seconds)
    return 0 if all(state.good for state in states) else TO_FETCH


def _words(command_line: str) -> list[str]:
    try:
        return shlex.split(command_line)
    except ValueError as error:
        raise ModelsError(f"--used-by is no command line ({error}): {command_line}") from None


def _tell(state: State, seconds: float) -> None:
    if state.good:
        what = f"{state.read} files read" if state.read else "no file has changed"
        print(f"{state.name}: {what}, {seconds:.1f} s")
        return
    for sentence in (*([state.missing] if state.missing else []), *state.faults):
        print(f"ddtree-models: {sentence}; site.yml fetches what is wrong.", file=sys.stderr)


def _remove(options: argparse.Namespace, config: Config) -> int:
    store = Store(config)
    noted = store.noted()
    if options.name not in noted and not options.all:
        raise ModelsError(f"{options.name} was never fetched on this host, so it is left alone")
    for name in noted if options.all else [options.name]:
        store.remove(name)
        print(f"removed {name}")
    return 0
