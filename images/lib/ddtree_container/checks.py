# SPDX-License-Identifier: Apache-2.0
"""What has to hold before weights are loaded, each with the sentence for when it does not."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import tempfile
from collections.abc import MutableMapping
from pathlib import Path

from . import ContainerError

SHM_LEAST = 1 << 30
CUDA_TIMEOUT_S = 60
_PROBE = """
import sys
sys.path.insert(0, sys.argv[1])
from ddtree_container.checks import probe_cuda
problem = probe_cuda()
print(problem)
sys.exit(1 if problem else 0)
"""
# Answers of cuInit and cuDeviceGetCount.
CUDA_REMEDIES = {
    3: "the driver is not initialised; look at dmesg on the host",
    34: "the container sees a stub of libcuda instead of the driver's",
    100: "no GPU is in the container: --gpus all, or --device nvidia.com/gpu=UUID",
    101: "a GPU in the container is not usable; look at nvidia-smi on the host",
    802: "the NVSwitch fabric is not up: nvidia-fabricmanager of the driver's version has to run on the host",
    803: "the driver's library and its kernel module differ: reboot the host after a driver upgrade",
    804: "this GPU does not support the CUDA compatibility library: install a newer driver",
    999: "unknown to CUDA; look at dmesg for Xid and at /dev/nvidia-uvm",
}


def prepare_folders(environment: MutableMapping[str, str]) -> str:
    """Makes HOME and caches usable; returns a line to say, if there is something to say.

    Raises:
        ContainerError: HOME or a cache cannot be written.
    """
    home = environment.get("HOME", "")
    _writable("HOME", home)
    cache = environment.setdefault("XDG_CACHE_HOME", f"{home}/.cache")
    environment.setdefault("TORCHINDUCTOR_CACHE_DIR", f"{cache}/torchinductor")
    for name in (
        "XDG_CACHE_HOME",
        "VLLM_CACHE_ROOT",
        "TRITON_CACHE_DIR",
        "TORCHINDUCTOR_CACHE_DIR",
    ):
        if name in environment:
            _writable(name, environment[name])
    folder, said = temporary_folder(environment)
    environment["TMPDIR"] = folder
    return said


def temporary_folder(environment: MutableMapping[str, str]) -> tuple[str, str]:
    """Folder for sockets and temporary files, and a line where it is not /tmp."""
    folder = environment.get("TMPDIR") or "/tmp"
    try:
        _writable("TMPDIR", folder)
    except ContainerError:
        if "TMPDIR" in environment:
            raise
        folder = f"{environment['HOME']}/tmp"
        _writable("TMPDIR", folder)
        return (
            folder,
            f"/tmp cannot be written; temporary files go to {folder} (--tmpfs /tmp: to memory)",
        )
    return folder, ""


def _writable(name: str, folder: str) -> None:
    try:
        os.makedirs(folder, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            file.write(bytes(4096))  # a full disk still makes files
    except OSError as error:
        raise ContainerError(
            f"{name}={folder or '(empty)'} cannot be written by user {os.getuid()} "
            f"({error.strerror}): mount a volume there that this user may write"
        ) from None


def check_shm(tensor_parallel_size: int, folder: str = "/dev/shm") -> None:
    """Ranks of one engine exchange data in /dev/shm; Docker's default is 64 MB.

    Raises:
        ContainerError: it is too small for more than one rank, or missing.
    """
    if tensor_parallel_size <= 1:
        return
    try:
        stat = os.statvfs(folder)
    except OSError as error:
        raise ContainerError(
            f"{folder} cannot be looked at ({error.strerror}), and tensor parallelism needs 1024 MiB "
            "there: --shm-size 16g"
        ) from None
    size = stat.f_frsize * stat.f_blocks
    if size < SHM_LEAST:
        raise ContainerError(
            f"/dev/shm has {size >> 20} MiB, and tensor parallelism needs 1024: --shm-size 16g"
        )


def check_cuda() -> None:
    """Initialises CUDA in a process of its own, which takes a second; weights take minutes.

    Raises:
        ContainerError: CUDA does not start, or sees no GPU.
    """
    # vLLM takes numbers alone there, and its own words for that come minutes later.
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    if "GPU-" in visible or "MIG-" in visible:
        raise ContainerError(
            f"CUDA_VISIBLE_DEVICES={visible} names a GPU by UUID, which vLLM does not take: unset it, "
            "and choose GPUs for the container (--device nvidia.com/gpu=UUID)"
        )
    probe = subprocess.Popen(
        [sys.executable, "-IS", "-c", _PROBE, str(Path(__file__).parents[1])],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        out, err = probe.communicate(timeout=CUDA_TIMEOUT_S)
    except BaseException as error:  # a stop too
        # Not waited for: what hangs in a driver is not ended by SIGKILL either.
        probe.kill()
        if not isinstance(error, subprocess.TimeoutExpired):
            raise
        raise ContainerError(
            f"CUDA did not initialise within {CUDA_TIMEOUT_S} s; look at dmesg on the host"
        ) from None
    if probe.returncode != 0:
        said = (out + err).strip().splitlines()
        raise ContainerError(
            said[-1] if said else f"the probe of CUDA ended with {probe.returncode}"
        )


def probe_cuda(library: str = "libcuda.so.1") -> str:
    """What stands in CUDA's way; empty if nothing does."""
    try:
        cuda = ctypes.CDLL(library)
    except OSError:
        return (
            "the container has no libcuda.so.1: run it with the NVIDIA container toolkit (--gpus all, "
            "or --device nvidia.com/gpu=UUID)"
        )
    code = cuda.cuInit(0)
    count = ctypes.c_int(0)
    if code == 0:
        code = cuda.cuDeviceGetCount(ctypes.byref(count)) or (0 if count.value else 100)
    if code == 0:
        return ""
    remedy = CUDA_REMEDIES.get(code, "look at nvidia-smi and dmesg on the host")
    return f"CUDA does not initialise (error {code}): {remedy}"
