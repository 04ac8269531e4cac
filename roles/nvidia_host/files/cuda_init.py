# SPDX-License-Identifier: Apache-2.0
"""Initialises CUDA, and says in JSON what came of it. Needs nothing but Python.

Usage: python3 cuda_init.py [SECONDS]
"""

import ctypes
import json
import os
import select
import signal
import sys

LIMIT_S = 60
MEANINGS = {
    0: "CUDA is ready",
    100: "no CUDA device: is CUDA_VISIBLE_DEVICES set, or are the device nodes missing?",
    101: "invalid device",
    304: "the operating system refused a call: do /dev/nvidiactl and /dev/nvidia-uvm exist?",
    801: "not supported",
    802: "system not yet initialised: the fabric manager has not finished on this NVSwitch host; "
    "`systemctl status nvidia-fabricmanager` says why, and its version has to be the driver's",
    803: "driver and library are of different versions: reboot the host",
    804: "the library is newer than this GPU's driver allows (forward compatibility)",
    999: "unknown error: are the kernel modules nvidia and nvidia_uvm loaded, and does the "
    "kernel's log have an Xid?",
}


def initialise():
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        return None, f"the driver's library cannot be loaded: {error}"
    result = library.cuInit(0)
    return result, f"cuInit answered {result}: {MEANINGS.get(result, 'see cudaError_enum')}"


def main(limit_s):
    """Asks in a process of its own: in a driver that hangs not even SIGKILL would end this one."""
    answers, answer = os.pipe()
    child = os.fork()
    if child == 0:
        # Whoever reads what is printed must not be kept waiting by this process.
        null = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(null, descriptor)
        os.write(answer, json.dumps(initialise()).encode())
        os._exit(0)
    os.close(answer)
    if not select.select([answers], [], [], limit_s)[0]:
        os.kill(child, signal.SIGKILL)
        return None, (
            f"cuInit did not end within {limit_s} s: the driver hangs. The kernel's log "
            "(`journalctl -k`) may have an Xid; reset the GPU or reboot the host"
        )
    text = os.read(answers, 1 << 16)
    _, status = os.waitpid(child, 0)
    if not text:
        return None, f"the process that initialises CUDA died, with wait status {status}"
    return json.loads(text)


result, sentence = main(int(sys.argv[1]) if len(sys.argv) > 1 else LIMIT_S)
print(json.dumps({"result": result, "sentence": sentence}))
