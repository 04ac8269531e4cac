# SPDX-License-Identifier: Apache-2.0
"""Initialises CUDA, and says in JSON what came of it. Needs nothing but Python."""

import ctypes
import json

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


def main():
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        return None, f"the driver's library cannot be loaded: {error}"
    result = library.cuInit(0)
    return result, f"cuInit answered {result}: {MEANINGS.get(result, 'see cudaError_enum')}"


result, sentence = main()
print(json.dumps({"result": result, "sentence": sentence}))
