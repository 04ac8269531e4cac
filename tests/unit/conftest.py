# SPDX-License-Identifier: Apache-2.0
"""What the tests of several kernels share."""

import pytest


@pytest.fixture(params=[227, 99], ids=lambda kilobytes: f"{kilobytes}-KB")
def gpu_tiles(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, device) -> None:
    """Launchers choose tiles as on a GPU that gives a block so much shared memory, or as much of it
    as this GPU has. The interpreter runs them all the same."""
    from ddtree_vllm.attention import tiles
    from ddtree_vllm.gdn import conv, launch, verify
    from ddtree_vllm.gpu import shared_memory_per_block

    room = 1024 * request.param
    if device.type == "cuda":
        room = min(room, shared_memory_per_block())
    else:
        for module in (conv, verify):
            monkeypatch.setattr(module, "overlapping", lambda: False)
    monkeypatch.setattr(conv, "interpreting", lambda: False)
    for module in (tiles, launch):
        monkeypatch.setattr(module, "interpreting", lambda: False)
        monkeypatch.setattr(module, "shared_memory_per_block", lambda: room)
