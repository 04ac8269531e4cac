# SPDX-License-Identifier: Apache-2.0
"""Leaves out the tests on real hosts where a machine can have none, and says why."""

import lab_hosts
import pytest

_LEFT_OUT = pytest.StashKey[str]()


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "hosts: needs root, systemd-nspawn, mmdebstrap and ansible")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    why = lab_hosts.missing()
    if not why:
        return
    drop = [item for item in items if item.get_closest_marker("hosts")]
    items[:] = [item for item in items if item not in drop]
    config.stash[_LEFT_OUT] = f"{len(drop)} tests marked hosts: {why}" if drop else ""
    config.hook.pytest_deselected(items=drop)


def pytest_terminal_summary(terminalreporter, config: pytest.Config) -> None:
    if config.stash.get(_LEFT_OUT, ""):
        terminalreporter.line(config.stash[_LEFT_OUT])


@pytest.fixture(scope="session")
def lab():
    """One host; its console is shown if it does not come up."""
    hosts = lab_hosts.Lab(1, lab_hosts.work_folder())
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
        report.sections.append(("journal of node1", hosts.journal(1, "ddtree-*")))
    return report
