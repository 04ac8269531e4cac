# SPDX-License-Identifier: Apache-2.0
"""Writes the variable table of a role's README from its `meta/argument_specs.yml`.

Usage: python tools/role_readme.py [--check] roles/ROLE...

The table stands between two comments, `<!-- variables -->` and `<!-- /variables -->`. With --check
nothing is written; the exit status is 1 if a table is out of date.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import yaml

BEGIN, END = "<!-- variables -->\n", "<!-- /variables -->\n"


def table(specification: dict[str, Any]) -> str:
    """Markdown table of the options of one entry point."""
    lines = ["| variable | type | default | meaning |", "|---|---|---|---|"]
    for name, option in specification["options"].items():
        kind = option["type"]
        if "elements" in option:
            kind += f" of {option['elements']}"
        default = f"`{json.dumps(option['default'])}`" if "default" in option else "required"
        meaning = option["description"]
        if isinstance(meaning, list):
            meaning = " ".join(meaning)
        if "choices" in option:
            meaning += " One of " + ", ".join(f"`{choice}`" for choice in option["choices"]) + "."
        lines.append(f"| `{name}` | {kind} | {default} | {meaning.strip()} |".replace("\n", " "))
    return "\n".join(lines) + "\n"


def rendered(role: Path) -> str:
    """The README as it should be.

    Raises:
        ValueError: it has no place for the table.
    """
    text = (role / "README.md").read_text()
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{role}/README.md has no {BEGIN.strip()} ... {END.strip()}")
    specs = yaml.safe_load((role / "meta/argument_specs.yml").read_text())
    return before + BEGIN + table(specs["argument_specs"]["main"]) + END + after


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true")
    parser.add_argument("roles", nargs="+", type=Path)
    options = parser.parse_args()
    stale = 0
    for role in options.roles:
        readme, wanted = role / "README.md", rendered(role)
        if readme.read_text() == wanted:
            continue
        if options.check:
            print(f"{readme}: the variable table is out of date; run tools/role_readme.py {role}")
            stale = 1
        else:
            readme.write_text(wanted)
    return stale


if __name__ == "__main__":
    sys.exit(main())
