# SPDX-License-Identifier: Apache-2.0
"""Environment variables and arguments of the container, turned into one `ddtree-vllm serve` command.

An argument wins over the variable of the same option, a variable over the default.
"""

from __future__ import annotations

import difflib
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from . import ContainerError

DEMO = Path("/opt/ddtree/demo")
# Of the demo pair. In float32 greedy output is the same to the token with and without trees.
DEMO_OPTIONS = {
    "--served-model-name": "demo",
    "--dtype": "float32",
    "--max-model-len": "512",
    "--max-num-seqs": "4",
}
BUDGET = "31"
DEFAULTS = {"--host": "0.0.0.0", "--port": "8000", "--shutdown-timeout": "30"}
OPTIONS = {
    "DDTREE_BUDGET": "--budget",
    "DDTREE_POLICY": "--policy",
    "DDTREE_STATIC_TREE": "--static-tree",
    "DDTREE_TOP_K": "--top-k",
    "DDTREE_SERVED_NAME": "--served-model-name",
    "DDTREE_HOST": "--host",
    "DDTREE_PORT": "--port",
    "DDTREE_SHUTDOWN_TIMEOUT": "--shutdown-timeout",
    "DDTREE_DTYPE": "--dtype",
    "DDTREE_MAX_MODEL_LEN": "--max-model-len",
    "DDTREE_MAX_NUM_SEQS": "--max-num-seqs",
    "DDTREE_TENSOR_PARALLEL_SIZE": "--tensor-parallel-size",
}
TREE_OPTIONS = ("--drafter", "--budget", "--policy", "--static-tree", "--top-k")
OTHERS = (
    "DDTREE_MODEL",
    "DDTREE_DRAFTER",
    "DDTREE_SPECULATION",
    "DDTREE_API_KEY_FILE",
    "DDTREE_ARGS",
)
ALIASES = {"-tp": "--tensor-parallel-size"}
# What Kubernetes adds to every pod beside a Service whose name begins with ddtree.
SERVICE_LINK = re.compile(
    r"DDTREE_(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_\w+)?)"
)
SERVICE_ADDRESS = re.compile(r"(tcp|udp|sctp)://")
# What vLLM has and this image has not, with the reason.
REFUSED = {
    "--config": "this image fills in options that count more than a file's; write them behind the "
    "image's name, or in DDTREE_ARGS",
    "--uds": "this image is asked over TCP, by its own health check too; leave it out, and choose "
    "--host and --port",
    "--model": "the model comes first; name it behind serve, or in DDTREE_MODEL",
}
# Options that are read or filled in here and in main.py. vLLM's parser takes the beginning of a name too.
READ = (
    *dict.fromkeys((*OPTIONS.values(), *DEFAULTS, *DEMO_OPTIONS, *TREE_OPTIONS)),
    *("--no-speculation", "--ssl-certfile", "--ssl-keyfile", "--ssl-cert-reqs"),
    *("--api-key", "--help"),
    *REFUSED,
    *ALIASES,
)


@dataclass(frozen=True)
class Serve:
    """A `ddtree-vllm serve` command.

    Attributes:
        model: checkpoint folder or name.
        options: everything behind it.
    """

    model: str
    options: tuple[str, ...]

    @property
    def command(self) -> list[str]:
        return ["ddtree-vllm", "serve", self.model, *self.options]

    def value(self, option: str) -> str | None:
        """The last value of an option; None if it is not there."""
        return _values(self.options).get(option)

    def number(self, option: str, default: int) -> int:
        """The same as a whole number.

        Raises:
            ContainerError: it is none.
        """
        text = self.value(option)
        if text is None:
            return default
        try:
            return int(text)
        except ValueError:
            raise ContainerError(f"{option} must be a whole number, not {text!r}") from None

    @property
    def url(self) -> str:
        """Where the container itself finds the server."""
        scheme = (
            "https" if {"--ssl-certfile", "--ssl-keyfile"} & {*_values(self.options)} else "http"
        )
        host = (self.value("--host") or "").strip("[]")
        host = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
        return f"{scheme}://{f'[{host}]' if ':' in host else host}:{self.port}"

    @property
    def port(self) -> int:
        port = self.number("--port", 8000)
        if not 1 <= port <= 65535:
            raise ContainerError(f"--port must be a port from 1 to 65535, not {port}")
        return port


def serve(
    arguments: Sequence[str], environment: Mapping[str, str], demo: Path | None = DEMO
) -> Serve:
    """The command that these arguments (behind `serve`) and variables ask for.

    Args:
        demo: folder of a pair to serve where no other is named; None if there is none.

    Raises:
        ContainerError: something is missing, unknown or contradicts itself.
    """
    _refuse_unknown(environment)
    given = [*arguments]
    model = given.pop(0) if given and not given[0].startswith("-") else ""
    given = [*_words("DDTREE_ARGS", environment), *given]
    options = _values(given)
    _refuse_abbreviations(options)
    for name, why in REFUSED.items():
        if name in options:
            raise ContainerError(f"{name}: {why}")
    if asks_for_help(given):
        raise ContainerError(
            "DDTREE_ARGS asks for help: give --help behind the image's name instead"
        )
    if options.get("--ssl-cert-reqs", "0") == "2":
        raise ContainerError(
            "--ssl-cert-reqs 2 asks clients for a certificate, and the image's own health check has "
            "none: leave it out, and let a proxy in front ask"
        )
    filled: dict[str, str] = dict(DEFAULTS)
    drafter = ""
    lonely = ""
    if model and environment.get("DDTREE_DRAFTER"):
        lonely = f"DDTREE_DRAFTER goes with DDTREE_MODEL and not with {model}; "
    if not model:
        model, drafter = environment.get("DDTREE_MODEL", ""), environment.get("DDTREE_DRAFTER", "")
        if not model and demo is not None and demo.is_dir():
            if drafter:
                raise ContainerError(
                    "DDTREE_DRAFTER is set and DDTREE_MODEL is not: name the drafter's target"
                )
            model, drafter = str(demo / "target"), str(demo / "drafter")
            filled.update(DEMO_OPTIONS)
    if not model:
        raise ContainerError(
            "DDTREE_MODEL is missing: a checkpoint folder in the container (mount it), or a name on "
            "Hugging Face"
        )
    filled.update({OPTIONS[name]: environment[name] for name in OPTIONS if environment.get(name)})
    if _speculates(options, environment):
        if drafter:
            filled["--drafter"] = drafter
        if "--drafter" not in {**filled, **options}:
            remedy = "" if lonely else "set DDTREE_DRAFTER, "
            raise ContainerError(
                f"the drafter is missing: {lonely}{remedy}give --drafter behind the model, or "
                "serve the model alone with DDTREE_SPECULATION=off"
            )
        if not {"--budget", "--static-tree"} & {*filled, *options}:
            filled["--budget"] = BUDGET
        switch = []
    else:
        filled = {name: value for name, value in filled.items() if name not in TREE_OPTIONS}
        switch = [] if "--no-speculation" in options else ["--no-speculation"]
    words = [w for name, value in filled.items() if name not in options for w in (name, value)]
    return Serve(model, (*words, *switch, *given))


def _refuse_abbreviations(names: Iterable[str]) -> None:
    """Raises ContainerError for the beginning of an option that is read here: it would go by unread."""
    for name in names:
        meant = [option for option in READ if option.startswith(name)]
        if meant and name not in (*meant, "-", "--"):
            raise ContainerError(
                f"{name} can stand for {' or '.join(meant)}: write the option out in full"
            )


def asks_for_help(words: Sequence[str]) -> bool:
    return any(word in ("-h", "--help") or word.startswith("--help=") for word in words)


def _speculates(options: Mapping[str, str], environment: Mapping[str, str]) -> bool:
    wanted = environment.get("DDTREE_SPECULATION", "") or "on"
    if wanted not in ("on", "off"):
        raise ContainerError(f"DDTREE_SPECULATION is on or off, not {wanted!r}")
    return wanted == "on" and "--no-speculation" not in options


def _refuse_unknown(environment: Mapping[str, str]) -> None:
    known = (*OPTIONS, *OTHERS)
    for name in sorted(environment):
        if not name.startswith("DDTREE_"):
            continue
        if SERVICE_LINK.fullmatch(name) or SERVICE_ADDRESS.match(environment[name]):
            raise ContainerError(
                f"{name}={environment[name]} is of a Kubernetes Service whose name begins with "
                "ddtree: set enableServiceLinks: false in the pod, or rename the Service"
            )
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f"; did you mean {near[0]}?" if near else f"; there are {', '.join(known)}"
            raise ContainerError(f"{name} is no variable of this image{hint}")


def _words(name: str, environment: Mapping[str, str]) -> list[str]:
    try:
        return shlex.split(environment.get(name, ""))
    except ValueError as error:
        raise ContainerError(
            f"{name} is not a list of words as a shell reads it: {error}"
        ) from None


def _values(words: Sequence[str]) -> dict[str, str]:
    """Value of each option among the words, "" for a switch; the last one holds."""
    values = {}
    for index, word in enumerate(words):
        if not word.startswith("-"):
            continue
        name, equals, value = word.partition("=")
        if not equals:
            follower = words[index + 1] if index + 1 < len(words) else ""
            value = "" if follower.startswith("--") else follower
        name = ALIASES.get(name, name.replace("_", "-"))
        values[name] = value
    return values
