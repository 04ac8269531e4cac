# SPDX-License-Identifier: Apache-2.0
"""One rank of the probe: all-reduces of known sums, every element checked.

Run as a program by `probe.py`, with whatever Python has torch; imports nothing of this package.
Prints one JSON line. Exit status: 0 sums right, 3 sums wrong, 4 nothing could be tried (there is no
torch, or no free memory on a GPU), 1 anything else.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
import time
from typing import Any

RIGHT, WRONG, UNABLE = 0, 3, 4
# Below and above NCCL's and vLLM's own switch-overs: a decode step's 10 KiB, then a prefill's.
_ELEMENTS = (1, 2560, 1 << 18, 1 << 24)
_ROUNDS = 20
_PERIOD = 251  # a prime, so that a shifted or swapped chunk shows


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", choices=("nccl", "gloo"), required=True)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--world-size", type=int, required=True)
    parser.add_argument("--store", required=True, help="file for the rendezvous")
    parser.add_argument("--timeout", type=float, required=True, help="seconds")
    parser.add_argument("--most-elements", type=int, default=_ELEMENTS[-1])
    options = parser.parse_args()
    try:
        return _run(options)
    except ImportError as error:
        print(f"{sys.executable} has no torch ({error})", flush=True)
    except Exception as error:
        # Of the caching allocator, of CUDA itself, or of NCCL: no class is common to them.
        if "out of memory" not in str(error).lower():
            raise
        print(f"a GPU has no memory free for it ({str(error).splitlines()[0]})", flush=True)
    # At once: a peer may hold this rank's end up.
    os._exit(UNABLE)


def _run(options: argparse.Namespace) -> int:
    import torch
    import torch.distributed as dist

    started = time.monotonic()
    device = torch.device("cpu")
    if options.backend == "nccl":
        torch.cuda.init()  # raises where nvidia-smi is content and CUDA is not (802)
        device = torch.device("cuda", options.rank)
        torch.cuda.set_device(device)
    dist.init_process_group(
        options.backend,
        init_method=f"file://{options.store}",
        rank=options.rank,
        world_size=options.world_size,
        timeout=datetime.timedelta(seconds=options.timeout),
    )
    checked = wrong = 0
    for elements in (count for count in _ELEMENTS if count <= options.most_elements):
        pattern = torch.arange(elements, device=device, dtype=torch.int32) % _PERIOD
        for turn in range(_ROUNDS if elements < _ELEMENTS[-1] else 3):
            # Small whole numbers: float32 sums are exact in any order.
            mine = (pattern + (options.rank + 1) * (turn + 1)).float()
            dist.all_reduce(mine)
            world = options.world_size
            wanted = (pattern * world + (turn + 1) * world * (world + 1) // 2).float()
            wrong += int((mine != wanted).sum())
            checked += elements
    peer_access = None
    if options.backend == "nccl" and options.world_size > 1:
        peers = [peer for peer in range(options.world_size) if peer != options.rank]
        peer_access = all(torch.cuda.can_device_access_peer(device, peer) for peer in peers)
        if peer_access and os.environ.get("NCCL_P2P_DISABLE") != "1":
            neighbour = (options.rank + 1) % options.world_size
            wrong += _copy_to_peer(torch, device, torch.device("cuda", neighbour))
    dist.barrier()
    print(
        json.dumps(
            {
                "rank": options.rank,
                "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
                "checked": checked,
                "wrong": wrong,
                "peer_access": peer_access,
                "seconds": round(time.monotonic() - started, 3),
            }
        ),
        flush=True,
    )
    dist.destroy_process_group()
    return WRONG if wrong else RIGHT


def _copy_to_peer(torch: Any, device: Any, peer: Any) -> int:
    """Wrong elements after a copy to the next GPU and back: what custom all-reduce builds on."""
    here = torch.arange(1 << 22, device=device, dtype=torch.int32)
    there = here.to(peer)
    wanted = torch.arange(1 << 22, device=peer, dtype=torch.int32)
    wrong = int((there != wanted).sum())
    return wrong + int((there.to(device) != here).sum())


if __name__ == "__main__":
    sys.exit(main())
