# SPDX-License-Identifier: Apache-2.0
"""docs/hosts.md names a test for each complaint about such services; every one of them exists."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
HEADING = "### What people complain of, and the test that it does not happen here"
COMPLAINTS = 17


def rows():
    text = (ROOT / "docs/hosts.md").read_text().partition(HEADING)[2].partition("\n#")[0]
    cells = re.findall(r"^\| (.+?) \| (`.+`) \|$", text, re.MULTILINE)
    return {symptom: re.findall(r"`(\w+)`", tests) for symptom, tests in cells}


def test_every_complaint_has_tests_that_exist():
    exist = {
        node.name
        for path in ROOT.glob("tests/**/test_*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef)
    }
    table = rows()
    assert len(table) == COMPLAINTS
    for symptom, tests in table.items():
        assert tests, symptom
        assert set(tests) <= exist, symptom
