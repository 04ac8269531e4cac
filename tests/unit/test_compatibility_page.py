# SPDX-License-Identifier: Apache-2.0
"""docs/compatibility.md has a row for every feature and none besides; tests of engines check what it says."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))

from compatibility import DOCUMENT, Compatibility, _page, _read, features


def test_every_feature_has_its_row() -> None:
    assert list(_read()) == features()


def test_the_page_is_what_its_rows_give() -> None:
    assert DOCUMENT.read_text(encoding="utf-8") == _page(_read())


def test_a_finding_that_the_page_does_not_say_fails() -> None:
    page = Compatibility(write=False)
    page.record("greedy")
    with pytest.raises(AssertionError, match="make compatibility"):
        page.record("greedy", "refused: no")
