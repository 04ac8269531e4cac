# SPDX-License-Identifier: Apache-2.0
"""What is known of each GPU, and which GPUs may serve at all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from . import cpulist
from .errors import TopologyError

_TRUE = ("true", "yes", "on", "enabled", "1")
_FALSE = ("false", "no", "off", "disabled", "0", "n/a", "[n/a]", "[not supported]", "none", "")
_KEYS = ("index", "name", "uuid", "memory_mib", "mig", "pci_bus_id", "busy", "cpus", "numa")


@dataclass(frozen=True)
class Gpu:
    """One GPU. `None` or "" means unknown, never a default.

    Attributes:
        index: number in nvidia-smi, which is the order of PCI addresses.
        memory_mib: total memory.
        mig: MIG mode is on.
        busy: the process that is not ours and uses the GPU, "" for none.
        cpus, numa: local CPUs and memory nodes (sysfs), preferred to those of the matrix.
    """

    index: int
    name: str = ""
    uuid: str = ""
    memory_mib: int | None = None
    mig: bool = False
    pci_bus_id: str = ""
    busy: str = ""
    cpus: str | None = None
    numa: tuple[int, ...] | None = None

    @property
    def kind(self) -> tuple[str, int | None]:
        """GPUs of one group must agree in this."""
        return self.name, self.memory_mib

    @property
    def kind_text(self) -> str:
        name = self.name or "GPU of unknown name"
        return f"{name}, {self.memory_mib} MiB" if self.memory_mib else name


def gpus_from(items: Sequence[Mapping[str, Any]]) -> list[Gpu]:
    """GPUs from plain mappings (JSON, Ansible), which may hold booleans and numbers as text.

    Keys: name, uuid, memory_mib, mig, pci_bus_id, busy (true or the name of the process), and
    optionally index (default: the position), cpus, numa.

    Raises:
        TopologyError: an unknown key, an unreadable value, or an index or UUID that repeats.
    """
    gpus = [_gpu_from(item, position) for position, item in enumerate(items)]
    if sorted(gpu.index for gpu in gpus) != list(range(len(gpus))):
        raise TopologyError(f"the indices of the {len(gpus)} GPUs given are not 0, 1, 2, ...")
    for attribute in ("uuid", "pci_bus_id"):
        known = [value for value in (getattr(gpu, attribute) for gpu in gpus) if value]
        for value in known:
            if known.count(value) > 1:
                raise TopologyError(f"two GPUs have the {attribute} {value}")
    return sorted(gpus, key=lambda gpu: gpu.index)


def _gpu_from(item: Mapping[str, Any], position: int) -> Gpu:
    if not isinstance(item, Mapping):
        raise TopologyError(f"gpus[{position}] is not a mapping with keys {', '.join(_KEYS)}")
    for key in item:
        if key not in _KEYS:
            raise TopologyError(f"gpus[{position}]: unknown key {key!r}; known: {', '.join(_KEYS)}")
    cpus, numa = item.get("cpus"), item.get("numa")
    try:
        if isinstance(numa, (list, tuple)):
            nodes = frozenset(int(node) for node in numa)
        else:
            nodes = cpulist.parse(str(numa)) if numa not in (None, "", "N/A") else frozenset()
        return Gpu(
            index=int(item.get("index", position)),
            name=str(item.get("name") or ""),
            uuid=str(item.get("uuid") or ""),
            memory_mib=int(item["memory_mib"]) if item.get("memory_mib") else None,
            mig=_boolean(item.get("mig")),
            pci_bus_id=str(item.get("pci_bus_id") or ""),
            busy=_busy(item.get("busy")),
            cpus=cpulist.format_list(cpulist.parse(str(cpus))) if cpus else None,
            numa=tuple(sorted(nodes)) or None,
        )
    except (TypeError, ValueError) as error:
        raise TopologyError(f"gpus[{position}]: {error}") from None


def _boolean(value: Any) -> bool:
    text = str(value if value is not None else "").strip().lower()
    if text in _TRUE:
        return True
    if text in _FALSE:
        return False
    raise ValueError(f"{value!r} is neither on nor off")


def _busy(value: Any) -> str:
    try:
        return "a process" if _boolean(value) else ""
    except ValueError:
        return str(value).strip()


def unfit(gpus: Sequence[Gpu]) -> dict[int, str]:
    """GPUs that may not serve whatever the plan: index -> reason, each a phrase."""
    reasons: dict[int, str] = {}
    for gpu in gpus:
        phrases = []
        if gpu.mig:
            phrases.append(f"MIG is on (turn it off with `nvidia-smi -i {gpu.index} -mig 0`)")
        if gpu.busy:
            phrases.append(f"in use by {gpu.busy}")
        if phrases:
            reasons[gpu.index] = "; ".join(phrases)
    return reasons


def main_kind(gpus: Sequence[Gpu]) -> tuple[str, int | None]:
    """The kind of GPU that serves on a mixed host: most memory in all, then the larger GPU."""
    kinds = {gpu.kind for gpu in gpus}

    def size(kind: tuple[str, int | None]) -> tuple[int, int, int, str]:
        alike = [gpu for gpu in gpus if gpu.kind == kind]
        memory = kind[1] or 0
        # The name last, so that a tie does not depend on the order of a set.
        return memory * len(alike), memory, len(alike), kind[0]

    return max(kinds, key=size)
