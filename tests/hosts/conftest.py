# SPDX-License-Identifier: Apache-2.0
"""The hosts that tests marked hosts share, and their journals where one of those fails."""

import lab_hosts
import pytest


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Asked for and impossible is an error: left out, it would look like a pass."""
    if not config.getoption("--hosts"):
        return
    if any(item.get_closest_marker("hosts") for item in items):
        why = lab_hosts.missing()
        if why:
            raise pytest.UsageError(f"the tests marked hosts cannot run: {why}")


@pytest.fixture(scope="session")
def lab():
    """Three hosts; their console is shown if they do not come up."""
    hosts = lab_hosts.Lab(3, lab_hosts.work_folder())
    try:
        hosts.up()
        yield hosts
    finally:
        hosts.down()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """Adds the journal of our units to a failed test."""
    report = yield
    hosts = item.funcargs.get("lab") if hasattr(item, "funcargs") else None
    if report.when == "call" and report.failed and hosts is not None:
        for number in range(1, hosts.count + 1):
            report.sections.append((f"journal of node{number}", hosts.journal(number, "ddtree-*")))
    return report
