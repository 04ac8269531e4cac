# SPDX-License-Identifier: Apache-2.0
"""Reads a target's and a drafter's checkpoint folder, and says in one sentence why they do not fit.

Everything here looks at config.json and at the headers of the safetensors files; no weights are
loaded, so a wrong drafter is refused in milliseconds. A Hugging Face name is left to vLLM.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DRAFTER_ARCHITECTURE = "DFlashDraftModel"


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint folder on this machine.

    Attributes:
        role: "target" or "drafter", for messages.
        path: the folder.
        config: its config.json.
        shapes: shape of every tensor by name, from the safetensors headers.
    """

    role: str
    path: Path
    config: Mapping[str, Any]
    shapes: Mapping[str, tuple[int, ...]]

    @property
    def text_config(self) -> Mapping[str, Any]:
        """The language model's part of the configuration; multimodal models nest it."""
        nested = self.config.get("text_config")
        return nested if isinstance(nested, Mapping) else self.config

    @property
    def dflash_config(self) -> Mapping[str, Any]:
        nested = self.config.get("dflash_config")
        return nested if isinstance(nested, Mapping) else {}

    def number(self, name: str) -> int:
        """A whole number of the language model's configuration, or ValueError."""
        value = self.text_config.get(name)
        if not isinstance(value, int) or isinstance(value, bool):
            raise ValueError(f"the {self.role}'s {self.path}/config.json gives no {name}")
        return value


def open_checkpoint(role: str, name: str) -> Checkpoint | None:
    """Reads the folder `name`; None when it is the name of a model on Hugging Face.

    Raises:
        ValueError: the folder, its config.json or its weights are missing or unreadable.
    """
    if not name:
        raise ValueError(f"the {role}'s name is empty; it must be a checkpoint folder")
    path = Path(name).expanduser()
    if not path.is_dir():
        if path.exists():
            raise ValueError(f"the {role} {name} is a file; it must be a checkpoint folder")
        if _is_hub_name(name):
            return None
        raise ValueError(f"the {role} {name} does not exist")
    config_path = path / "config.json"
    try:
        config = json.loads(config_path.read_text())
    except FileNotFoundError:
        raise ValueError(f"the {role} {name} has no config.json") from None
    except (OSError, ValueError) as error:
        raise ValueError(f"the {role}'s {config_path} cannot be read: {error}") from None
    if not isinstance(config, dict):
        raise ValueError(f"the {role}'s {config_path} is not a JSON object")
    return Checkpoint(role, path, config, _tensor_shapes(role, path))


def _is_hub_name(name: str) -> bool:
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        return False
    offline = os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on")
    return not offline or _in_hub_cache(name)


def _in_hub_cache(name: str) -> bool:
    home = Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser()
    cache = Path(os.environ.get("HF_HUB_CACHE", home / "hub"))
    return (cache / f"models--{name.replace('/', '--')}").is_dir()


def _tensor_shapes(role: str, path: Path) -> dict[str, tuple[int, ...]]:
    files = sorted(path.glob("*.safetensors"))
    index = path / "model.safetensors.index.json"
    if index.exists():
        try:
            named = set(json.loads(index.read_text())["weight_map"].values())
        except (OSError, ValueError, KeyError, AttributeError) as error:
            raise ValueError(f"the {role}'s {index} cannot be read: {error}") from None
        missing = sorted(named - {file.name for file in files})
        if missing:
            raise ValueError(
                f"the {role}'s weights are incomplete: {path} lacks {missing[0]}"
                + (f" and {len(missing) - 1} more" if len(missing) > 1 else "")
            )
    if not files:
        raise ValueError(f"the {role}'s weights are missing: no *.safetensors in {path}")
    shapes: dict[str, tuple[int, ...]] = {}
    for file in files:
        shapes.update(_header(role, file))
    return shapes


def _header(role: str, file: Path) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Tensor names and shapes: 8 bytes of length, then JSON (the safetensors format)."""
    size = file.stat().st_size
    try:
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            if length > size:
                raise ValueError("the header is longer than the file")
            header = json.loads(stream.read(length))
        header.pop("__metadata__", None)
        end = 8 + length + max((t["data_offsets"][1] for t in header.values()), default=0)
        tensors = [(name, tuple(t["shape"])) for name, t in header.items()]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        raise ValueError(
            f"the {role}'s {file} is not a safetensors file ({error}); a large-file pointer, "
            "perhaps, instead of the weights"
        ) from None
    if end > size:
        raise ValueError(
            f"the {role}'s {file} is cut short: {size:,} bytes of {end:,}; fetch it again"
        )
    yield from tensors


def block_size(drafter: Checkpoint) -> int:
    """Tokens of one drafter pass, the bonus token's position included."""
    value = drafter.dflash_config.get("block_size", drafter.config.get("block_size"))
    if not isinstance(value, int) or value < 2:
        raise ValueError(
            f"the drafter's {drafter.path}/config.json gives no block_size of 2 or more; it says "
            "how many positions one pass drafts"
        )
    return value


def check_target(target: Checkpoint) -> None:
    """Raises ValueError when the target is a drafter."""
    if DRAFTER_ARCHITECTURE in (target.config.get("architectures") or []):
        raise ValueError(
            f"{target.path} is a DFlash drafter, which generates nothing alone; MODEL is the target "
            "that it was made for"
        )


def check_tokenizer(target: Checkpoint) -> None:
    """Raises ValueError without a tokenizer: vLLM would serve this family with an empty one."""
    names = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json")
    if not any((target.path / name).exists() for name in names):
        raise ValueError(
            f"the target {target.path} has no tokenizer ({names[0]}); fetch it again, or name one with "
            "--tokenizer"
        )


def check_drafter(drafter: Checkpoint) -> None:
    """Raises ValueError unless this is a DFlash drafter, complete in itself."""
    architectures = drafter.config.get("architectures") or []
    if DRAFTER_ARCHITECTURE not in architectures:
        raise ValueError(
            f"{drafter.path} is no DFlash drafter: its architecture is "
            f"{', '.join(map(str, architectures)) or 'not named'}, not {DRAFTER_ARCHITECTURE}"
        )
    block_size(drafter)
    mask = drafter.dflash_config.get("mask_token_id")
    vocabulary = drafter.number("vocab_size")
    if not isinstance(mask, int) or not 0 <= mask < vocabulary:
        raise ValueError(
            f"the drafter's dflash_config.mask_token_id is {mask}; it must be a token below "
            f"{vocabulary}"
        )
    if not _layer_ids(drafter):
        raise ValueError(
            "the drafter's dflash_config.target_layer_ids is missing; it says which of the "
            "target's hidden states the drafter reads"
        )
    _check_tensors(drafter)


def _check_tensors(drafter: Checkpoint) -> None:
    """Raises ValueError when weights are missing: vLLM would draft with whatever is in memory."""
    reads_states = drafter.dflash_config.get(
        "use_aux_hidden_state", drafter.config.get("use_aux_hidden_state", True)
    )
    expected = ["fc."] if reads_states else []
    expected += [f"layers.{i}." for i in range(drafter.config.get("num_hidden_layers") or 0)]
    found = [name.removeprefix("model.") for name in drafter.shapes]
    for prefix in expected:
        if not any(name.startswith(prefix) for name in found):
            raise ValueError(
                f"the drafter's weights are incomplete: {drafter.path} has no {prefix}*; fetch it again"
            )


def check_pair(target: Checkpoint, drafter: Checkpoint) -> None:
    """Raises ValueError unless the drafter was made for a target of this shape."""
    check_drafter(drafter)
    layers = target.number("num_hidden_layers")
    hidden = target.number("hidden_size")
    drafted_hidden = drafter.config.get("target_hidden_size", drafter.number("hidden_size"))
    compared = [
        ("hidden size", hidden, drafted_hidden),
        ("vocabulary size", target.number("vocab_size"), drafter.number("vocab_size")),
        ("number of layers", layers, drafter.config.get("num_target_layers", layers)),
    ]
    for what, of_target, expected in compared:
        if of_target != expected:
            raise ValueError(
                f"the drafter {drafter.path} was not made for the target {target.path}: it expects "
                f"a {what} of {expected}, and the target's is {of_target}"
            )
    ids = _layer_ids(drafter)
    outside = [i for i in ids if not 0 <= i < layers]
    if outside:
        raise ValueError(
            f"the drafter {drafter.path} was not made for the target {target.path}: it reads the "
            f"hidden state of layer {outside[0]}, and the target has layers 0 to {layers - 1}"
        )
    projection = drafter.shapes.get("fc.weight")
    if projection is not None and projection[-1] != hidden * len(ids):
        raise ValueError(
            f"the drafter's fc.weight takes {projection[-1]} inputs, but {len(ids)} hidden states "
            f"of the target are {hidden * len(ids)}"
        )


def _layer_ids(drafter: Checkpoint) -> list[int]:
    ids = drafter.dflash_config.get("target_layer_ids")
    if not isinstance(ids, list) or not all(isinstance(i, int) for i in ids):
        return []
    return ids
