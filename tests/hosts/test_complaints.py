# SPDX-License-Identifier: Apache-2.0
"""docs/hosts.md names tests for complaints about such services and for faults; they exist."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COMPLAINTS = "### What people complain of, and the test that it does not happen here"
FAULTS = "### Faults that the tests on hosts inject"


def rows(heading):
    text = (ROOT / "docs/hosts.md").read_text().partition(heading)[2].partition("\n#")[0]
    cells = re.findall(r"^\| (.+?) \| (`.+`) \|$", text, re.MULTILINE)
    return {symptom: re.findall(r"`(\w+)`", tests) for symptom, tests in cells}


def run_by_pytest():
    """What pytest collects and runs: module-level functions of test files, not left out for good."""
    found = set()
    for path in ROOT.glob("tests/**/test_*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                marks = {
                    part.attr
                    for decorator in node.decorator_list
                    for part in ast.walk(decorator)
                    if isinstance(part, ast.Attribute)
                }
                if not marks & {"skip", "xfail", "fixture"}:
                    found.add(node.name)
    return found


@pytest.mark.parametrize(("heading", "count"), [(COMPLAINTS, 17), (FAULTS, 15)])
def test_every_complaint_and_fault_has_tests_that_are_run(heading, count):
    run = run_by_pytest()
    table = rows(heading)
    assert len(table) == count
    for symptom, tests in table.items():
        assert tests, symptom
        assert set(tests) <= run, (symptom, set(tests) - run)
