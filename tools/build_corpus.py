#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Packs a CPython standard library into one compressed file for `train_demo_pair.py`."""

import argparse
import json
import platform
import re
import sys
from pathlib import Path

from demo_pair import corpus


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "library",
        type=Path,
        nargs="?",
        default=corpus.default_library(),
        help="a CPython Lib folder (default: %(default)s)",
    )
    parser.add_argument("--out", type=Path, default=Path("build/corpus/stdlib.jsonl.xz"))
    args = parser.parse_args()
    if not (args.library / "ast.py").is_file():
        parser.error(f"{args.library} is not a CPython Lib folder: it has no ast.py.")
    in_path = re.search(r"python(\d+\.\d+)", args.library.name)
    version = in_path.group(1) if in_path else "of the folder given"
    if args.library == corpus.default_library():
        version = platform.python_version()
    header = corpus.write(corpus.collect(args.library), args.out, python_version=version)
    print(json.dumps(header | {"out": str(args.out), "bytes": args.out.stat().st_size}, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
