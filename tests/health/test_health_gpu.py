# SPDX-License-Identifier: Apache-2.0
"""What `nvidia-smi -q` and the kernel's log say of a GPU."""

from pathlib import Path

import pytest

from ddtree_health import gpu
from ddtree_health.errors import HealthError

WELL = (Path(__file__).parent / "fixtures/q-1x-h200-driver580.txt").read_text()
UUID = "GPU-00000000-0000-0000-0000-000000000000"


def host(q=WELL, log=""):
    """A host whose nvidia-smi and journal say this; an exception is raised instead."""

    def run(command):
        said = q if command[0] == "nvidia-smi" else log
        if isinstance(said, Exception):
            raise said
        return said

    return run


def with_value(line, value, occurrence=1):
    """The healthy output with one value changed; `line` is the name as it is indented."""
    lines = WELL.splitlines()
    hits = [i for i, text in enumerate(lines) if text.partition(" : ")[0].strip() == line]
    index = hits[occurrence - 1]
    lines[index] = lines[index].partition(" : ")[0] + " : " + value
    return "\n".join(lines)


def test_a_healthy_gpu_passes():
    result = gpu.check([UUID], run=host())
    assert (result.status, result.because) == ("pass", "1 GPUs without fault")


def test_values_are_found_by_their_path():
    values = gpu.parse(WELL)["00000000:00:06.0"]
    assert values["ECC Errors", "Volatile", "DRAM Uncorrectable"] == "0"
    assert values["ECC Errors", "Aggregate", "DRAM Uncorrectable"] == "0"
    assert values["Clocks Event Reasons", "HW Slowdown", "HW Thermal Slowdown"] == "Not Active"
    assert values["GPU UUID",] == UUID


@pytest.mark.parametrize(
    ("line", "value", "occurrence", "words"),
    [
        ("DRAM Uncorrectable", "3", 1, "3 uncorrectable memory errors since the driver loaded"),
        ("SRAM Uncorrectable Parity", "1", 1, "1 uncorrectable memory errors"),
        ("Remapping Failure Occurred", "Yes", 1, "a row could not be remapped"),
        ("Unrepairable Memory", "Yes", 1, "memory cannot be repaired"),
        ("SRAM Threshold Exceeded", "Yes", 1, "SRAM errors are beyond their limit"),
        ("HW Thermal Slowdown", "Active", 1, "it is slowed down: HW Thermal Slowdown"),
        ("HW Power Brake Slowdown", "Active", 1, "it is slowed down: HW Power Brake"),
        ("SW Thermal Slowdown", "Active", 1, "it is slowed down: SW Thermal Slowdown"),
        ("GPU Recovery Action", "Reset", 1, "the driver asks for recovery action Reset"),
        ("Fan Speed", "GPU is lost", 1, "it has fallen off the bus"),
        ("State", "In Progress", 1, "its NVLink fabric is In Progress, not Completed"),
        ("Summary", "Unhealthy", 1, "its NVLink fabric is unhealthy"),
    ],
)
def test_each_fault_is_named(line, value, occurrence, words):
    result = gpu.check([UUID], run=host(with_value(line, value, occurrence)))
    assert (result.status, result.hung) == ("fail", False)
    assert result.because.startswith("GPU 00000000:00:06.0: ")
    assert words in result.because


@pytest.mark.parametrize(
    ("line", "value", "occurrence"),
    [
        ("DRAM Uncorrectable", "3", 2),  # aggregate: of the GPU's life, already dealt with
        ("DRAM Correctable", "9", 1),
        ("SW Power Cap", "Active", 1),
        ("State", "Completed", 1),
    ],
)
def test_what_is_usual_is_no_fault(line, value, occurrence):
    assert gpu.check([UUID], run=host(with_value(line, value, occurrence))).status == "pass"


def test_pending_remapping_is_not_a_pending_mig_mode():
    remapping = WELL.split("Remapped Rows")[1]
    changed = WELL.replace(remapping, remapping.replace("Pending  ", "Pending X", 1))
    assert changed != WELL
    text = WELL.replace(remapping, remapping.replace(": No", ": Yes", 1))
    result = gpu.check([UUID], run=host(text))
    assert "rows wait to be remapped: reset the GPU" in result.because
    mig = WELL.replace(
        "Pending                                        : Disabled", "Pending : Enabled"
    )
    assert gpu.check([UUID], run=host(mig)).status == "pass"


@pytest.mark.parametrize("number", [48, 63, 74, 79, 94, 95, 119])
def test_xids_of_hardware_fail(number):
    log = f"NVRM: Xid (PCI:0000:00:06): {number}, pid='<unknown>', name=<unknown>, ...\n" * 3
    result = gpu.check([UUID], run=host(log=log))
    assert result.because == f"GPU 00000000:00:06.0: Xid {number}, {gpu.XIDS[number]}"


@pytest.mark.parametrize("number", [13, 31, 43, 45])
def test_xids_of_programs_do_not(number):
    log = f"NVRM: Xid (PCI:0000:00:06): {number}, pid=1, Ch 00000008"
    assert gpu.check([UUID], run=host(log=log)).status == "pass"


def test_an_xid_of_another_instances_gpu_is_not_ours():
    two = WELL + WELL[WELL.index("GPU 00000000:00:06.0") :].replace("00:06.0", "00:07.0").replace(
        UUID, "GPU-b"
    )
    log = "NVRM: Xid (PCI:0000:00:07): 94, pid=1"
    assert gpu.check([UUID], run=host(two, log)).status == "pass"
    assert gpu.check(["GPU-b"], run=host(two, log)).status == "fail"


def test_a_gpu_that_left_the_list_is_named():
    result = gpu.check([UUID, "GPU-b"], run=host())
    assert (result.status, result.because) == ("fail", "GPU-b is gone")


def test_an_xid_79_of_a_gpu_that_left_the_list_is_told():
    log = "NVRM: Xid (PCI:0000:2a:00): 79, pid=1, GPU has fallen off the bus."
    assert "GPU 00000000:2A:00.0: Xid 79" in gpu.check([UUID], run=host(log=log)).because


def test_nvidia_smi_that_lost_a_handle_means_off_the_bus():
    said = HealthError(
        "nvidia-smi failed with exit status 15: Unable to determine the device handle for "
        "GPU0000:2A:00.0: Unknown Error"
    )
    assert gpu.check([UUID], run=host(said)).because.startswith("a GPU has fallen off the bus")


def test_a_driver_that_hangs_fails():
    said = HealthError("nvidia-smi did not answer within 30 s")
    assert gpu.check([UUID], run=host(said)).status == "fail"


def test_a_host_without_gpus_is_passed_over_unless_gpus_are_expected():
    said = HealthError("nvidia-smi is not on this host")
    assert gpu.check([], run=host(said)).status == "skip"
    assert gpu.check([UUID], run=host(said)).status == "fail"


def test_an_unreadable_kernel_log_is_said():
    result = gpu.check([UUID], run=host(log=HealthError("journalctl failed")))
    assert result.status == "unknown"
    assert "Xids unknown: journalctl failed" in result.because
