# SPDX-License-Identifier: Apache-2.0
"""The GPUs: there, without memory errors, not slowed down by heat, on the bus.

Reads `nvidia-smi -q` and the kernel's Xid messages. A restart of the engine repairs none of what is
found here, so nothing here counts as hung.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from .errors import HealthError
from .report import FAIL, PASS, SKIP, UNKNOWN, Result
from .unit import Run, run_command

# A GPU's values by path, such as ("ECC Errors", "Volatile", "DRAM Uncorrectable").
Values = Mapping[tuple[str, ...], str]

_SECTION = re.compile(r"^GPU ([0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-9A-Fa-f])\s*$")
_XID = re.compile(r"NVRM: Xid \(PCI:([0-9A-Fa-f:.]+)\): (\d+)")
_GONE = re.compile(
    r"GPU is lost|Unable to determine the device handle|Unknown Error|has fallen off the bus", re.I
)
_UNSET = ("", "N/A", "[N/A]", "None", "[Not Supported]", "Not Supported")
_THROTTLE_GROUPS = ("Clocks Event Reasons", "Clocks Throttle Reasons")
# Heat and power brakes. SW Power Cap is a GPU at its power limit: what a busy GPU should be.
_THROTTLES = (
    "HW Thermal Slowdown",
    "HW Power Brake Slowdown",
    "SW Thermal Slowdown",
)
# What each path must not say: the driver's own verdicts on the memory.
_BAD_FLAGS = {
    ("Remapped Rows", "Pending"): "rows wait to be remapped: reset the GPU",
    ("Remapped Rows", "Remapping Failure Occurred"): "a row could not be remapped: replace the GPU",
    ("Retired Pages", "Pending Page Blacklist"): "pages wait to be retired: reset the GPU",
    ("ECC Errors", "Aggregate", "SRAM Threshold Exceeded"): "SRAM errors are beyond their limit",
    ("ECC Errors", "Channel Repair Pending"): "a memory channel waits for repair: reset the GPU",
    ("ECC Errors", "TPC Repair Pending"): "a TPC waits for repair: reset the GPU",
    ("ECC Errors", "Unrepairable Memory"): "memory cannot be repaired: replace the GPU",
}
# Xids of hardware and driver. The others are errors of programs (13, 31, 43, 45, 68, ...).
XIDS = {
    48: "double-bit ECC error",
    62: "internal micro-controller halt",
    63: "row remapping",
    64: "row remapping failed",
    74: "NVLink error",
    79: "GPU has fallen off the bus",
    92: "high rate of single-bit ECC errors",
    94: "contained ECC error",
    95: "uncontained ECC error",
    119: "GSP firmware time-out",
    120: "GSP firmware error",
    136: "link training failed",
    140: "unrecovered ECC error",
    149: "NVLink error",
}


def parse(text: str) -> dict[str, dict[tuple[str, ...], str]]:
    """Values of each GPU of `nvidia-smi -q`, by bus address.

    Raises:
        HealthError: it holds no GPU.
    """
    gpus: dict[str, dict[tuple[str, ...], str]] = {}
    path: list[tuple[int, str]] = []
    current: dict[tuple[str, ...], str] | None = None
    for line in text.splitlines():
        section = _SECTION.match(line)
        if section:
            current = gpus.setdefault(address(section.group(1)), {})
            path = []
            continue
        if current is None or not line.strip():
            continue
        indent = len(line) - len(line.lstrip())
        while path and path[-1][0] >= indent:
            path.pop()
        name, colon, value = line.partition(" : ")
        path.append((indent, name.strip()))
        if colon:
            current[tuple(part for _, part in path)] = value.strip()
    if not gpus:
        raise HealthError("nvidia-smi -q names no GPU")
    return gpus


def address(bus: str) -> str:
    """A bus address in one form: domain of 8 digits, function, upper case.

    The kernel writes 0000:18:00 where nvidia-smi writes 00000000:18:00.0.
    """
    if "." not in bus:
        bus += ".0"
    domain, _, rest = bus.partition(":")
    return f"{domain.rjust(8, '0')}:{rest}".upper()


def faults(values: Values) -> list[str]:
    """What is wrong with one GPU, in sentences."""
    found = []
    if any(_GONE.search(value) for value in values.values()):
        found.append("it has fallen off the bus")
    action = values.get(("GPU Recovery Action",), "")
    if action not in _UNSET:
        found.append(f"the driver asks for recovery action {action}")
    for path, value in values.items():
        if path[:2] == ("ECC Errors", "Volatile") and "Uncorrectable" in path[-1]:
            if value.isdigit() and int(value):
                found.append(f"{value} uncorrectable memory errors since the driver loaded")
        elif path in _BAD_FLAGS and value.split()[:1] == ["Yes"]:
            found.append(_BAD_FLAGS[path])
        elif path[0] in _THROTTLE_GROUPS and path[-1] in _THROTTLES and value == "Active":
            found.append(f"it is slowed down: {path[-1]}")
    state = values.get(("Fabric", "State"), "")
    if state not in (*_UNSET, "Completed"):
        found.append(f"its NVLink fabric is {state}, not Completed")
    if values.get(("Fabric", "Health", "Summary"), "").lower() == "unhealthy":
        found.append("its NVLink fabric is unhealthy")
    return found


def xid_faults(kernel_log: str) -> dict[str, list[str]]:
    """Faults that the kernel's log reports, by bus address."""
    found: dict[str, list[str]] = {}
    for bus, number in _XID.findall(kernel_log):
        meaning = XIDS.get(int(number))
        if meaning is None:
            continue
        sentences = found.setdefault(address(bus), [])
        sentence = f"Xid {number}, {meaning}"
        if sentence not in sentences:
            sentences.append(sentence)
    return found


def check(
    uuids: Sequence[str] = (),
    *,
    run: Run = run_command,
    xid_window_s: int = 3600,
) -> Result:
    """Asks nvidia-smi and the kernel.

    Args:
        uuids: the GPUs that have to be there; empty looks at all, and a host may have none.
        xid_window_s: how far back Xids count.
    """
    try:
        gpus = parse(run(["nvidia-smi", "-q"]))
    except HealthError as error:
        sentence = str(error)
        if not uuids and "is not on this host" in sentence:
            return Result("gpu", SKIP, "the engine uses no GPU")
        if _GONE.search(sentence):
            sentence = f"a GPU has fallen off the bus: {sentence}"
        return Result("gpu", FAIL, sentence)
    by_uuid = {values.get(("GPU UUID",), ""): bus for bus, values in gpus.items()}
    wrong = [f"{uuid} is gone" for uuid in uuids if uuid not in by_uuid]
    watched = {by_uuid[uuid] for uuid in uuids if uuid in by_uuid} if uuids else set(gpus)
    note = ""
    try:
        log = run(
            [
                *("journalctl", "--dmesg", "--no-pager", "--output=cat", "--quiet"),
                f"--since=-{xid_window_s}s",
            ]
        )
    except HealthError as error:
        log, note = "", f"; Xids unknown: {error}"
    xids = xid_faults(log)
    for bus in sorted(watched | (set(xids) - set(gpus))):
        for sentence in (*faults(gpus.get(bus, {})), *xids.get(bus, ())):
            wrong.append(f"GPU {bus}: {sentence}")
    data = {"gpus": len(watched)}
    if wrong:
        return Result("gpu", FAIL, "; ".join(wrong) + note, data)
    return Result(
        "gpu", UNKNOWN if note else PASS, f"{len(watched)} GPUs without fault{note}", data
    )
