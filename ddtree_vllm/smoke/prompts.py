# SPDX-License-Identifier: Apache-2.0
"""What the engines are asked to continue."""

# The kind of text the demo target was trained on, written for this file. The last one is soon
# complete for the target, so that an end of text inside an accepted path is among what is compared.
PROMPTS = (
    '''\
class Stack:
    """A last-in, first-out stack."""

    def __init__(self, items=()):
        self._items = list(items)

    def push(self, item):
        self._items.append(item)

    def pop(self):
''',
    """\
class QueueTest(unittest.TestCase):

    def setUp(self):
        self.queue = Queue(maxsize=2)

    def test_put(self):
        self.queue.put(1)
        self.queue.put(2)
        self.assertEqual(self.queue.qsize(), 2)
        self.assertTrue(self.queue.full())

    def test_get(self):
        self.queue.put(1)
        self.assertEqual(
""",
    """\
    def test_repr(self):
        self.assertEqual(repr(Point(1, 2)), "Point(1, 2)")
        self.assertEqual(repr(Point(0, 0)), "Point(0, 0)")

    def test_eq(self):
""",
    """\
# Names of the days and months.

days = ["Monday", "Tuesday", "Wednesday", "Thursday"]
months = ["January", "February", "March", "April",
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
import socket
import select
import threading

class Server(threading.Thread):
    def __init__(self, host, port):
        threading.Thread.__init__(self)
        self.sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
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
def parse_header(line):
    name, sep, value = line.partition(":")
    if not sep:
        raise ValueError("not a header: %r" % line)
    name = name.strip().lower()
""",
)

SEEDED_PROMPTS = (PROMPTS[0], PROMPTS[4])
"""Few, as sampling is slow under Triton's interpreter."""
