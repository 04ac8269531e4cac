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


@pytest.mark.parametrize(("heading", "count"), [(COMPLAINTS, 17), (FAULTS, 13)])
def test_every_complaint_and_fault_has_tests_that_exist(heading, count):
    exist = {
        node.name
        for path in ROOT.glob("tests/**/test_*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef)
    }
    table = rows(heading)
    assert len(table) == count
    for symptom, tests in table.items():
        assert tests, symptom
        assert set(tests) <= exist, symptom
