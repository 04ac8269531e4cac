# SPDX-License-Identifier: Apache-2.0
"""The plugin's own configuration, and the vLLM options it turns into.

`DDTreeConfig` travels as `--additional-config '{"ddtree": {...}}'`: vLLM hashes it into its compile
cache and hands it to every process. `vllm_options` is what `ddtree-vllm serve` adds to a command
line; written out by hand, the same options make a plain `vllm serve` draft trees.

Importing this module imports neither vLLM nor torch, so that bad input is refused at once.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

if TYPE_CHECKING:
    from vllm.config import VllmConfig

KEY = "ddtree"
"""Our key in vLLM's `additional_config`."""

MAX_BUDGET = 127
"""Most nodes of a draft tree; with its root that is 128 rows of one forward pass."""

MAX_TOP_K = 127

AUTO_BUDGETS = ((1, 63), (2, 31), (3, 15))
"""Budgets of `--budget auto`: (requests in the batch, nodes), each up to the next entry. The most
tokens per second of those measured on an H200 with the 27B shape, or within 1 % (docs/benchmarks);
every entry is faster than a chain. Past some 64 rows a step's matrix products grow with its rows."""

WORKER = {
    "cuda": "ddtree_vllm.engine.worker.DDTreeWorker",
    "cpu": "ddtree_vllm.engine.worker.DDTreeCPUWorker",
}

# ddtree-vllm's own options, which vLLM does not have, and those it sets on vLLM's command line, which
# counts more than a file does.
_OPTIONS_NOT_IN_A_FILE = {
    *("drafter", "budget", "policy", "static-tree", "top-k", "no-speculation"),
    *("model", "worker-cls", "attention-backend", "additional-config"),
    *("speculative-config", "spec-method", "spec-model", "spec-tokens"),
}

Device = Literal["cuda", "cpu"]
Policy = Literal["ddtree", "chain", "static"]


class DDTreeConfig(BaseModel):
    """How draft trees are built. Every field is checked; unknown ones are refused.

    Attributes:
        budget: draft nodes per request and step, 1 to 127. Equals vLLM's `num_speculative_tokens`.
        policy: `ddtree`, the most probable prefixes chosen anew each step; `chain`, the drafter's
            first choice at every position, as plain DFlash does; `static`, the same shape always.
        static_tree: for policy `static`, its nodes as lists of ranks: [0] is the drafter's first
            choice, [0, 2] that node's third child. Stored parents first.
        top_k: candidates per position a tree may use. Policy `static` takes as many as its ranks
            need unless this is given.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    budget: int = Field(strict=True)
    policy: Policy = "ddtree"
    static_tree: list[list[int]] | None = None
    top_k: int = Field(default=8, strict=True)

    @field_validator("budget")
    @classmethod
    def _budget_in_range(cls, budget: int) -> int:
        if not 1 <= budget <= MAX_BUDGET:
            raise ValueError(f"budget must be between 1 and {MAX_BUDGET} nodes, not {budget}")
        return budget

    @field_validator("top_k")
    @classmethod
    def _top_k_in_range(cls, top_k: int) -> int:
        if not 1 <= top_k <= MAX_TOP_K:
            raise ValueError(f"top_k must be between 1 and {MAX_TOP_K} candidates, not {top_k}")
        return top_k

    @field_validator("static_tree", mode="before")
    @classmethod
    def _well_formed(cls, static_tree: Any) -> list[list[int]] | None:
        if static_tree is None:
            return None
        # Late: the builder's package imports torch.
        from ddtree_vllm.tree import check_static_tree

        return [list(node) for node in check_static_tree(static_tree)]

    @model_validator(mode="after")
    def _tree_fits_policy(self) -> DDTreeConfig:
        if self.policy != "static":
            if self.static_tree is not None:
                raise ValueError(
                    f"a static tree was given with policy {self.policy!r}; it belongs to 'static'"
                )
            return self
        if self.static_tree is None:
            raise ValueError("policy 'static' needs a static tree, a list of lists of ranks")
        if len(self.static_tree) > self.budget:
            raise ValueError(
                f"the static tree has {len(self.static_tree)} nodes, more than the budget of "
                f"{self.budget}"
            )
        max_rank = max(max(node) for node in self.static_tree)
        if "top_k" not in self.model_fields_set:
            object.__setattr__(self, "top_k", max_rank + 1)
        elif max_rank >= self.top_k:
            raise ValueError(
                f"the static tree uses rank {max_rank}, but top_k {self.top_k} leaves ranks 0 to "
                f"{self.top_k - 1}"
            )
        return self

    @classmethod
    def create(cls, **values: Any) -> DDTreeConfig:
        """The configuration, or ValueError with one sentence about the first thing wrong."""
        try:
            return cls(**values)
        except ValidationError as error:
            raise ValueError(_sentence(error)) from None

    @classmethod
    def from_additional_config(cls, additional_config: Any) -> DDTreeConfig:
        """Reads `VllmConfig.additional_config`.

        Raises:
            ValueError: it has no entry "ddtree", or a wrong one.
        """
        entry = additional_config.get(KEY) if isinstance(additional_config, Mapping) else None
        if not isinstance(entry, Mapping):
            raise ValueError(
                "ddtree-vllm needs its configuration: add "
                '--additional-config \'{"ddtree": {"budget": N}}\', N as in num_speculative_tokens'
            )
        return cls.create(**entry)

    def to_additional_config(self) -> dict[str, Any]:
        """The entry "ddtree", without what is left at its default."""
        entry = self.model_dump(exclude_none=True, exclude={"policy", "top_k"})
        if self.policy != "ddtree":
            entry["policy"] = self.policy
        if "top_k" in self.model_fields_set:
            entry["top_k"] = self.top_k
        return {KEY: entry}


def uses_trees(vllm_config: VllmConfig) -> bool:
    """Whether this engine drafts trees: it speculates, and its additional config has our entry.

    Under the same plugin an engine may also run without speculation, or with another method; it is
    then vLLM's own.
    """
    additional = vllm_config.additional_config
    return (
        vllm_config.speculative_config is not None
        and isinstance(additional, Mapping)
        and KEY in additional
    )


def _sentence(error: ValidationError) -> str:
    first = error.errors()[0]
    name = ".".join(str(part) for part in first["loc"])
    if first["type"] == "value_error":
        return str(first["ctx"]["error"]).rstrip(".")
    if first["type"] == "extra_forbidden":
        known = ", ".join(DDTreeConfig.model_fields)
        return f"unknown ddtree setting {name!r}; there are {known}"
    if first["type"] == "missing":
        return f"the ddtree configuration lacks {name!r}"
    expected = first["msg"].removeprefix("Input should be ")
    return f"{name} must be {expected}, not {first['input']!r}"


def vllm_options(
    drafter: str | None,
    config: DDTreeConfig | None,
    device: Device,
    given: Sequence[str] = (),
    budgets: Sequence[tuple[int, int]] = (),
) -> list[str]:
    """vLLM's command-line options for this configuration, merged with those a user gave.

    Args:
        drafter: path or Hugging Face name of the DFlash drafter; None without speculation.
        config: None serves without speculation, in the same worker and with the same kernels.
        device: where the engine runs; the CPU needs another worker class and eager mode.
        given: options of the user's. One that says the same as ours is kept once; JSON options are
            merged key by key.
        budgets: (requests, nodes), budgets from that batch size on; empty: `config.budget` always.

    Returns:
        All options, ours first.

    Raises:
        ValueError: an option given contradicts the configuration; the sentence names both sides.
    """
    options = _Options(given)
    ours = _fixed(options, "--worker-cls", WORKER[device])
    if device == "cuda":
        ours += _fixed(options, "--attention-backend", "CUSTOM")
    else:
        # The CPU has one backend; vLLM would only log that it takes no other.
        _fixed(options, "--attention-backend", "CPU_ATTN")
        if options.take_flag("--no-enforce-eager"):
            raise ValueError("--no-enforce-eager: on the CPU the engine runs in eager mode only")
        options.take_flag("--enforce-eager")
        ours.append("--enforce-eager")

    speculative = options.take_json("--speculative-config", "-sc")
    for option, key in (
        ("--spec-method", "method"),
        ("--spec-model", "model"),
        ("--spec-tokens", "num_speculative_tokens"),
    ):
        value = options.take(option)
        if value is not None:
            # vLLM takes these beside --speculative-config only when it lacks the key.
            speculative.setdefault(key, int(value) if value.isdigit() else value)
    additional = options.take_json("--additional-config")

    if config is None:
        if speculative:
            raise ValueError("a speculative configuration was given together with no speculation")
        if KEY in additional:
            raise ValueError('--additional-config has an entry "ddtree", but nothing is drafted')
    else:
        wanted: dict[str, Any] = {
            "method": "dflash",
            "model": drafter,
            "num_speculative_tokens": config.budget,
        }
        if budgets:
            ends = [start - 1 for start, _ in budgets[1:]] + [budgets[-1][0]]
            wanted["num_speculative_tokens_per_batch_size"] = [
                [start, end, nodes] for (start, nodes), end in zip(budgets, ends, strict=True)
            ]
        speculative = _merged("--speculative-config", wanted, speculative)
        entry = additional.pop(KEY, {})
        if not isinstance(entry, Mapping):
            raise ValueError('--additional-config: the entry "ddtree" must be a JSON object')
        # What was left at its default in `config` may be chosen here.
        chosen = config.model_dump(include=config.model_fields_set)
        entry = _merged('--additional-config "ddtree"', chosen, entry)
        additional.update(DDTreeConfig.create(**entry).to_additional_config())
        ours += ["--speculative-config", json.dumps(speculative)]
    if additional:
        ours += ["--additional-config", json.dumps(additional)]
    return ours + options.rest


def config_file_options(given: Sequence[str], device: Device) -> list[str]:
    """Names, as --options, of what the file of vLLM's --config sets; none without one.

    vLLM reads that file itself, after ddtree-vllm has decided, and the command line counts more.

    Raises:
        ValueError: the file cannot be read, or sets what belongs on the command line.
    """
    path = _config_file(given)
    if path is None:
        return []
    import yaml

    try:
        with open(path, encoding="utf-8") as file:
            settings = yaml.safe_load(file)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(
            f"--config: {path} cannot be read: {' '.join(str(error).split())}"
        ) from None
    if not isinstance(settings, dict) or not all(isinstance(key, str) for key in settings):
        raise ValueError(f"--config: {path} must hold options by name, such as port: 8000")
    names = {key: with_dashes(f"--{key}") for key in settings}
    for key, name in names.items():
        graphs = (name, settings[key]) in (("--enforce-eager", False), ("--no-enforce-eager", True))
        if name.partition(".")[0][2:] in _OPTIONS_NOT_IN_A_FILE:
            raise ValueError(
                f"--config: {path} sets {key}, which belongs on the command line of ddtree-vllm"
            )
        if graphs and device == "cpu":
            raise ValueError(f"--config: {path} sets {key}; on the CPU the engine is always eager")
    return list(names.values())


def _config_file(given: Sequence[str]) -> str | None:
    for position, argument in enumerate(given):
        if argument.startswith("--config="):
            # vLLM would pass over it without a word.
            raise ValueError(f"write --config {argument.partition('=')[2]}, with a space")
        if argument == "--config":
            if position + 1 == len(given):
                raise ValueError("--config needs a value")
            return given[position + 1]
    return None


def _fixed(options: _Options, name: str, value: str) -> list[str]:
    given = options.take(name)
    if given not in (None, value):
        raise ValueError(
            f"{name} {given} contradicts ddtree-vllm, which needs {value}; leave it out"
        )
    return [name, value]


def _merged(name: str, ours: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """`given` over `ours`, refusing a key that both have with different values."""
    for key, value in given.items():
        if key in ours and ours[key] != value:
            raise ValueError(
                f"{name}: {key} is {json.dumps(value)} there, but {json.dumps(ours[key])} follows "
                "from ddtree-vllm's own options; leave it out"
            )
    return {**ours, **given}


class _Options:
    """A command line from which single options are taken; `rest` is what is left, in order."""

    def __init__(self, given: Sequence[str]) -> None:
        self.rest = list(given)

    def take_flag(self, name: str) -> bool:
        """Removes an option without a value; says whether it was there."""
        kept = [arg for arg in self.rest if _name(arg) != name]
        found = len(kept) < len(self.rest)
        self.rest = kept
        return found

    def take(self, *names: str) -> str | None:
        """Removes an option with a value and returns the value; the last one counts."""
        value = None
        kept: list[str] = []
        arguments = iter(self.rest)
        for arg in arguments:
            name, equals, text = arg.partition("=")
            if _name(name) not in names:
                kept.append(arg)
                continue
            following = text if equals else next(arguments, None)
            if following is None:
                raise ValueError(f"{name} needs a value")
            value = following
        self.rest = kept
        return value

    def take_json(self, name: str, *aliases: str) -> dict[str, Any]:
        """Removes a JSON option, whole or in vLLM's dotted form (`--name.key.subkey value`)."""
        text = self.take(name, *aliases)
        merged: dict[str, Any] = {}
        if text is not None:
            try:
                merged = json.loads(text)
            except json.JSONDecodeError as error:
                raise ValueError(f"{name} is not valid JSON ({error}): {text}") from None
            if not isinstance(merged, dict):
                raise ValueError(f"{name} must be a JSON object, not {text}")
        for dotted in [arg for arg in self.rest if _name(arg).startswith(name + ".")]:
            option = dotted.partition("=")[0]
            value = self.take(_name(option))
            if value is None:
                continue
            path = option.split(".")[1:]
            if option.endswith("+"):
                raise ValueError(f"{option}: write this list as JSON in {name}")
            into = merged
            for key in path[:-1]:
                into = into.setdefault(key, {})
                if not isinstance(into, dict):
                    raise ValueError(f"{option}: {key} is given a value of its own as well")
            into[path[-1]] = _scalar(value)
        return merged


def with_dashes(argument: str) -> str:
    """The argument, its option's name spelt with dashes: vLLM allows underscores up to the first dot."""
    if not argument.startswith("--"):
        return argument
    option, equals, value = argument.partition("=")
    return _name(option) + equals + value


def _name(argument: str) -> str:
    """The name of an option, spelt with dashes and without its value."""
    if not argument.startswith("--"):
        return argument
    name, dot, path = argument.partition("=")[0].partition(".")
    return name.replace("_", "-") + dot + path


def _scalar(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text
