# SPDX-License-Identifier: Apache-2.0
"""What nvidia_host has to know of a host, in JSON. Changes nothing; needs Python 3.9 alone.

Usage: python3 facts.py CONFIG_DIR [SYSCTL...]
"""

import contextlib
import glob
import json
import re
import subprocess
import sys

# The driver, by the names that Debian, Ubuntu and NVIDIA's own repository give its packages.
DRIVER_PACKAGES = re.compile(
    r"nvidia-(driver|dkms|kernel|open|utils|compute-utils|firmware|fabricmanager|imex|persistenced"
    r"|modprobe|settings|smi|alternative|legacy|headless|vdpau|opencl|egl)(-.*)?"
    r"|libnvidia-(?!container).*|libcuda1(-.*)?|libcudadebugger.*|cuda-drivers.*"
    r"|linux-(modules|objects|signatures)-nvidia.*|nvlsm|libnvsdm.*|xserver-xorg-video-nvidia.*"
)
SERVICES = ("nvidia-persistenced.service", "nvidia-fabricmanager.service")
NVIDIA, SWITCH = "0x10de", "0x068000"
TIMEOUT_S = 60  # a wedged driver blocks nvidia-smi for ever


def ask(*command):
    """Exit status and output; 127 if there is no such program."""
    try:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
    except FileNotFoundError:
        return 127, f"{command[0]} is not there"
    try:
        out, err = process.communicate(timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        # Not waited for to the end: what hangs in a driver is not ended by SIGKILL either.
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(1)
        return 124, f"{command[0]} did not answer within {TIMEOUT_S} s"
    return process.returncode, (out or err).strip()


def query(fields):
    """A row of values for each GPU; none if nvidia-smi does not answer or know a field."""
    status, text = ask("nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits")
    return [line.split(", ") for line in text.splitlines()] if status == 0 else []


def read(path):
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""


def nvswitches():
    """NVSwitches on the bus; GPUs of the A100 generation do not tell of their fabric."""
    count = 0
    for device in glob.glob("/sys/bus/pci/devices/*"):
        if read(f"{device}/vendor").strip() == NVIDIA and read(f"{device}/class").strip() == SWITCH:
            count += 1
    return count


def packages():
    """The driver's installed packages, by whether they are held."""
    found = {"held": [], "free": []}
    form = "--showformat=${db:Status-Want} ${db:Status-Status} ${Package}\n"
    _, text = ask("dpkg-query", "--show", form)
    for line in text.splitlines():
        wanted, status, name = line.split()
        if status == "installed" and DRIVER_PACKAGES.fullmatch(name):
            found["held" if wanted == "hold" else "free"].append(name)
    return found


def services():
    return [
        name
        for name in SERVICES
        if ask("systemctl", "list-unit-files", "--no-legend", name)[1].startswith(name)
    ]


def sysctls(names):
    """Values by name; those that this kernel does not have are missing."""
    found = {}
    for name in names:
        text = read("/proc/sys/" + name.replace(".", "/"))
        if text:
            found[name] = " ".join(text.split())
    return found


def main(folder, *names):
    status, said = ask("nvidia-smi", "--query-gpu=uuid", "--format=csv,noheader")
    module = re.search(r"Kernel Module.*?  ([0-9.]+)", read("/proc/driver/nvidia/version"))
    manager = re.search(r"\d+\.[\d.]*\d", ask("nv-fabricmanager", "--version")[1])
    gpus = query("uuid,driver_version,power.min_limit,power.max_limit")
    print(
        json.dumps(
            {
                "smi": {"status": status, "said": " ".join(said.split())},
                "loaded": module.group(1) if module else "",
                "driver": gpus[0][1] if gpus else "",
                "power": [{"uuid": g[0], "min": g[2], "max": g[3]} for g in gpus],
                "on_fabric": any(row[0] not in ("N/A", "[N/A]") for row in query("fabric.state")),
                "nvswitches": nvswitches(),
                "fabric_manager": manager.group(0) if manager else "",
                "services": services(),
                "packages": packages(),
                "held_by_role": read(f"{folder}/nvidia-held").split(),
                "sysctls": sysctls(names),
                "sysctls_before": read(f"{folder}/sysctl-before.conf").splitlines(),
            }
        )
    )


main(*sys.argv[1:])
