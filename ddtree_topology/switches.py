# SPDX-License-Identifier: Apache-2.0
"""GPU peer access (P2P): one decision for the host, and every switch that follows it.

NCCL, vLLM's custom all-reduce, torch's symmetric memory and FlashInfer's all-reduce each open peer
memory by themselves. Where peer access is broken they hang or return wrong sums, so they are
switched together or not at all. That the driver reports access is no proof: only a finished,
checked all-reduce is (`ddtree-topology probe`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from .errors import TopologyError
from .links import nvlinks
from .matrix import PEER_STATUS

# Every switch of vLLM 0.32 that opens peer memory, in its "off" position.
NCCL_OFF = {"NCCL_P2P_DISABLE": "1"}
VLLM_OFF = {
    "VLLM_ALLREDUCE_USE_FLASHINFER": "0",
    "VLLM_ALLREDUCE_USE_FLASHINFER_PCIE_IPC": "0",
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
    "VLLM_USE_NCCL_SYMM_MEM": "0",
}
ARGUMENTS_OFF = (
    "--disable-custom-all-reduce",
    # FlashInfer's all-reduce fused with RMSNorm listens to no environment variable.
    "--compilation-config.pass_config.fuse_allreduce_rms=false",
)
VERDICT_VERSION = 1
NO_PAIRS = "No group has two GPUs, so no P2P switch is set."


class Decision(NamedTuple):
    """Attributes:
    on: P2P is used.
    probed: a probe's verdict covers these groups, this driver and this firmware.
    because: a sentence.
    """

    on: bool
    probed: bool
    because: str


def switches(on: bool, size: int) -> tuple[dict[str, str], dict[str, str], list[str]]:
    """NCCL's variables, vLLM's variables and vLLM's arguments for one group of `size` GPUs."""
    if on or size == 1:
        return {}, {}, []
    return dict(NCCL_OFF), dict(VLLM_OFF), list(ARGUMENTS_OFF)


def decide(
    wanted: str,
    pairs: Sequence[tuple[int, int]],
    table: Sequence[Sequence[str]],
    *,
    peer_status: Sequence[Sequence[str]] | None,
    verdict: Mapping[str, Any] | None,
    fingerprint: Mapping[str, Any],
) -> tuple[Decision, list[str]]:
    """Decides for all groups at once; also returns warnings.

    Args:
        wanted: "on", "off" or "auto".
        pairs: pairs of GPUs that share a group.
        table: links between all GPUs, as in `Matrix.links`.
        peer_status: `matrix.parse_p2p`, if it was asked.
        verdict: what `ddtree-topology probe` wrote, if it ran.
        fingerprint: what a verdict is good for, see `planner`.

    Raises:
        TopologyError: the verdict says that these groups do not work at all.
    """
    verdict, warnings = _usable(verdict, fingerprint)
    probed = verdict is not None
    if verdict is not None and not verdict["collectives"]:
        raise TopologyError(f"the probe failed with P2P on and off: {verdict['because']}")
    if not pairs:
        return Decision(False, probed, NO_PAIRS), warnings
    if wanted == "off":
        return Decision(False, probed, "P2P is off because the operator said so."), warnings
    if wanted == "on":
        if verdict is not None and not verdict["p2p"]:
            warnings.append(f"P2P is forced on although the probe failed: {verdict['because']}")
        return Decision(True, probed, "P2P is on because the operator said so."), warnings

    for i, j in pairs:
        status = peer_status[i][j] if peer_status is not None else "OK"
        if status != "OK":
            because = (
                f"P2P is off: the driver reports {status} ({PEER_STATUS[status]}) "
                f"between GPU{i} and GPU{j}."
            )
            return Decision(False, probed, because), warnings
    if verdict is not None:
        return Decision(bool(verdict["p2p"]), True, str(verdict["because"])), warnings

    warnings.append("P2P is not proven: run `ddtree-topology probe`.")
    if all(nvlinks(table[i][j]) for i, j in pairs):
        because = "P2P is on, not proven: all groups are joined by NVLink."
        return Decision(True, False, because), warnings
    because = (
        "P2P is off, not proven: over PCIe it can hang or corrupt data although the driver reports "
        "it; a passed `ddtree-topology probe` turns it on."
    )
    return Decision(False, False, because), warnings


def _usable(
    verdict: Mapping[str, Any] | None, fingerprint: Mapping[str, Any]
) -> tuple[Mapping[str, Any] | None, list[str]]:
    if verdict is None:
        return None, []
    keys = {"version": int, "p2p": bool, "collectives": bool, "because": str, "fingerprint": dict}
    for key, kind in keys.items():
        if not isinstance(verdict.get(key), kind):
            raise TopologyError(
                f"the probe's verdict has no valid {key!r}: run `ddtree-topology probe` again"
            )
    if verdict["version"] != VERDICT_VERSION:
        return None, ["The probe's verdict is of another version and was ignored."]
    if verdict.get("backend") == "gloo":
        return None, ["The probe ran on gloo, which says nothing of GPUs; it was ignored."]
    changed = sorted(
        key for key in fingerprint if verdict["fingerprint"].get(key) != fingerprint[key]
    )
    if changed:
        return None, [f"The probe's verdict was ignored: changed since are {', '.join(changed)}."]
    return verdict, []
