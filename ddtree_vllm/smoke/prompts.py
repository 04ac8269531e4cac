# SPDX-License-Identifier: Apache-2.0
"""What the engines are asked to continue."""

# Openings of the kind of text the demo target was trained on, written for this file.
PROMPTS = (
    """\
import os
import sys


def read_config(path):
    \"\"\"Read a configuration file and return its sections as a dictionary.\"\"\"
    with open(path, encoding="utf-8") as f:
""",
    """\
class Stack:
    \"\"\"A last-in, first-out stack.\"\"\"

    def __init__(self, items=()):
        self._items = list(items)

    def push(self, item):
        self._items.append(item)

    def pop(self):
""",
    """\
def main(argv=None):
    parser = argparse.ArgumentParser(description="Print the lines of a file.")
    parser.add_argument("path", help="the file to read")
    parser.add_argument("-n", "--number", action="store_true",
""",
    """\
    def test_append(self):
        queue = Queue(maxsize=2)
        queue.put(1)
        queue.put(2)
        self.assertEqual(queue.qsize(), 2)
        self.assertRaises(
""",
    """\
def parse_header(line):
    name, sep, value = line.partition(":")
    if not sep:
        raise ValueError("not a header: %r" % line)
    name = name.strip().lower()
""",
    """\
class Handler(BaseHandler):
    def __init__(self, host, port=80, timeout=None):
        self.host = host
        self.port = port
        self.timeout = timeout

    def __repr__(self):
""",
    """\
try:
    import ssl
except ImportError:
    ssl = None

__all__ = ["connect", "Connection", "ConnectionError"]

class ConnectionError(Exception):
""",
    """\
    for key, value in sorted(self._values.items()):
        if value is None:
            continue
        if isinstance(value, str):
            value = [value]
        for item in value:
""",
)
SEEDED_PROMPTS = (PROMPTS[0], PROMPTS[1])
"""Few and short-lived: sampling is slow under Triton's interpreter."""
