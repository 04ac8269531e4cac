# SPDX-License-Identifier: Apache-2.0
"""PCIe bridges between GPUs, in a made-up /sys."""

import pytest

from ddtree_topology.acs import bridges_between, peer_redirects, redirects_peers, sysfs_address

GPU0 = "pci0000:40/0000:40:01.1/0000:41:00.0/0000:42:00.0/0000:43:00.0"
GPU1 = "pci0000:40/0000:40:01.1/0000:41:00.0/0000:42:01.0/0000:44:00.0"
GPU2 = "pci0000:c0/0000:c0:01.1/0000:c1:00.0"


def config(control=None, *, size=4096):
    """Configuration space with an AER capability at 0x100 and, behind it, ACS."""
    space = bytearray(size)
    if size > 0x100:
        space[0x100:0x104] = (
            0x0001 | 2 << 16 | (0x140 if control is not None else 0) << 20
        ).to_bytes(4, "little")
    if control is not None:
        space[0x140:0x144] = (0x000D | 1 << 16).to_bytes(4, "little")
        space[0x146:0x148] = control.to_bytes(2, "little")
    return bytes(space)


@pytest.fixture
def sysfs(tmp_path):
    """Builds /sys: GPUs at their paths, bridges with ACS control words, IOMMU groups of a type."""

    def build(controls, iommu="DMA-FQ", size=4096):
        links = tmp_path / "sys/bus/pci/devices"
        links.mkdir(parents=True)
        for path in (GPU0, GPU1, GPU2):
            folder = tmp_path / "sys/devices"
            for part in path.split("/"):
                folder /= part
                folder.mkdir(parents=True, exist_ok=True)
                if part.startswith("pci") or (links / part).is_symlink():
                    continue
                (folder / "config").write_bytes(config(controls.get(part), size=size))
                (links / part).symlink_to(folder)
            if iommu:
                (folder / "iommu_group").mkdir()
                (folder / "iommu_group/type").write_text(iommu + "\n")
        return str(tmp_path)

    return build


ADDRESSES = {0: "00000000:43:00.0", 1: "00000000:44:00.0", 2: "00000000:C1:00.0"}


def test_address_as_sysfs_writes_it():
    assert sysfs_address("00000000:C1:00.0") == "0000:c1:00.0"
    assert sysfs_address("0000:43:00.0") == "0000:43:00.0"


def test_only_the_bridges_below_the_meeting_point_are_passed():
    assert bridges_between(GPU0, GPU1) == ["0000:42:00.0", "0000:42:01.0"]
    assert bridges_between(GPU0, GPU2) == [
        "0000:40:01.1",
        "0000:41:00.0",
        "0000:42:00.0",
        "0000:c0:01.1",
    ]


@pytest.mark.parametrize(
    ("control", "redirects"),
    [
        (None, False),
        (0x0, False),
        (0x1, False),
        (0x4, True),
        (0x8, True),
        (0x1D, True),
        (0x11, False),
    ],
)
def test_redirect_bits(control, redirects):
    assert redirects_peers(config(control)) is redirects


def test_a_short_configuration_space_is_unknown():
    assert redirects_peers(config(size=64)) is None


def test_a_loop_of_capabilities_ends():
    space = bytearray(config())
    space[0x100:0x104] = (0x0001 | 0x100 << 20).to_bytes(4, "little")
    assert redirects_peers(bytes(space)) is False


def test_the_bridge_on_the_path_is_named(sysfs):
    root = sysfs({"0000:42:01.0": 0x1D, "0000:c0:01.1": 0x1})
    found, warnings = peer_redirects(ADDRESSES, root)
    assert found == [
        {"pair": [0, 1], "bridges": ["0000:42:01.0"]},
        {"pair": [1, 2], "bridges": ["0000:42:01.0"]},
    ]
    assert warnings == []


@pytest.mark.parametrize("iommu", ["identity", None])
def test_without_translation_nothing_is_reported(sysfs, iommu):
    assert peer_redirects(ADDRESSES, sysfs({"0000:42:01.0": 0x1D}, iommu)) == ([], [])


def test_what_cannot_be_read_is_said(sysfs):
    found, warnings = peer_redirects({0: ADDRESSES[0], 1: ADDRESSES[1]}, sysfs({}, size=64))
    assert found == []
    assert warnings == [
        "ACS of 0000:42:00.0, 0000:42:01.0 could not be read (root may): whether the IOMMU gets "
        "between GPUs was not checked there."
    ]
