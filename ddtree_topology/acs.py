# SPDX-License-Identifier: Apache-2.0
"""PCIe bridges that send peer traffic through a translating IOMMU, read from sysfs.

With Access Control Services (ACS) a bridge can redirect what one device sends another up to the
root complex. If the IOMMU translates there, copies arrive but collectives between GPUs hang. This
module only reports; clearing ACS bits is the operator's decision, bridge by bridge.

Source: PCI Express Base Specification 5.0, section 7.7.8 (ACS extended capability).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from itertools import combinations
from typing import Any

_ACS_CAPABILITY = 0x000D
_FIRST_EXTENDED = 0x100
_CONTROL = 6  # offset of the ACS control register in its capability
_REQUEST_REDIRECT = 0x4
_COMPLETION_REDIRECT = 0x8


def sysfs_address(pci_bus_id: str) -> str:
    """nvidia-smi's "00000000:C1:00.0" as sysfs writes it, "0000:c1:00.0"."""
    domain, _, rest = pci_bus_id.strip().lower().partition(":")
    return f"{domain[-4:]}:{rest}"


def redirects_peers(config: bytes) -> bool | None:
    """Whether ACS redirects requests or completions, from a bridge's configuration space.

    None if the extended part is missing, which is what a reader without privileges gets.
    """
    if len(config) < _FIRST_EXTENDED + 4:
        return None
    offset, seen = _FIRST_EXTENDED, set()
    while offset >= _FIRST_EXTENDED and offset + 8 <= len(config) and offset not in seen:
        seen.add(offset)
        header = int.from_bytes(config[offset : offset + 4], "little")
        if header & 0xFFFF == _ACS_CAPABILITY:
            control = int.from_bytes(config[offset + _CONTROL : offset + _CONTROL + 2], "little")
            return bool(control & (_REQUEST_REDIRECT | _COMPLETION_REDIRECT))
        offset = header >> 20
    return False


def bridges_between(first: str, second: str) -> list[str]:
    """Bridges that traffic between two devices passes, from their paths under /sys/devices.

    The paths part at a switch or at the root; every bridge below that point is on the way.
    """
    one, two = first.strip("/").split("/"), second.strip("/").split("/")
    common = 0
    while common < min(len(one), len(two)) and one[common] == two[common]:
        common += 1
    return [part for part in one[common:-1] + two[common:-1] if part.count(":") == 2]


def peer_redirects(
    addresses: Mapping[int, str], root: str = "/"
) -> tuple[list[dict[str, Any]], list[str]]:
    """Pairs of GPUs whose peer traffic is redirected into a translating IOMMU.

    Args:
        addresses: PCI address of each GPU, as nvidia-smi or sysfs writes it.
        root: where /sys is looked for.

    Returns:
        [{"pair": [i, j], "bridges": [addresses]}] and warnings.
    """
    devices = os.path.join(root, "sys/bus/pci/devices")
    paths = {}
    for index, address in addresses.items():
        device = os.path.join(devices, sysfs_address(address))
        if os.path.exists(device) and _iommu_translates(device):
            paths[index] = os.path.realpath(device)
    found, unreadable = [], set()
    for i, j in combinations(sorted(paths), 2):
        bridges = []
        for bridge in bridges_between(paths[i], paths[j]):
            redirects = redirects_peers(_read(os.path.join(devices, bridge, "config")))
            if redirects is None:
                unreadable.add(bridge)
            elif redirects:
                bridges.append(bridge)
        if bridges:
            found.append({"pair": [i, j], "bridges": bridges})
    warnings = []
    if unreadable:
        warnings.append(
            f"ACS of {', '.join(sorted(unreadable))} could not be read (root may): whether the "
            "IOMMU gets between GPUs was not checked there."
        )
    return found, warnings


def _iommu_translates(device: str) -> bool:
    """The group's type is DMA or DMA-FQ when it translates, identity when it does not."""
    return _read(os.path.join(device, "iommu_group/type")).startswith(b"DMA")


def _read(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError:
        return b""
