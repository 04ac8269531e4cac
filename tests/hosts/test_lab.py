# SPDX-License-Identifier: Apache-2.0
"""The test hosts themselves."""

import lab_hosts
import pytest

pytestmark = [pytest.mark.hosts, pytest.mark.timeout(1200)]


def test_hosts_that_a_killed_run_left_behind_are_ended_before_new_ones_boot(lab, tmp_path):
    """The network namespaces and mounts of the first run are still there: nobody took it down."""
    for name in ("key", "key.pub", "rootfs", "rootfs.recipe"):
        (tmp_path / name).symlink_to(lab.folder / name)
    killed = lab_hosts.Lab(1, tmp_path, lend_venv=False)
    later = lab_hosts.Lab(1, tmp_path, lend_venv=False)
    try:
        killed.up()
        first = killed.run(1, "cat /proc/sys/kernel/random/boot_id; touch /root/of-the-first-run")
        killed.release()

        later.up()

        second = later.run(1, "cat /proc/sys/kernel/random/boot_id; ls /root")
    finally:
        killed.down()
        later.down()
    assert second != first
    assert "of-the-first-run" not in second
