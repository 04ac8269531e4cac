# SPDX-License-Identifier: Apache-2.0
"""The streaming client counts as turned away what was, and nothing that a server took and dropped."""

import socket
import threading

import pytest
from streaming_client import stream

DONE = b'data: {"choices": [{"finish_reason": "length"}]}\n\ndata: [DONE]\n\n'


def head(status):
    return f"HTTP/1.1 {status} x\r\nConnection: close\r\n\r\n".encode()


@pytest.fixture
def served():
    """Answers one connection with these bytes, once the request is there; returns the port."""
    sockets = []

    def serve(answer):
        listening = socket.create_server(("127.0.0.1", 0))
        listening.settimeout(20)
        sockets.append(listening)

        def talk():
            connection, _ = listening.accept()
            with connection:
                connection.settimeout(20)
                while b"min_tokens" not in connection.recv(65536, socket.MSG_PEEK):
                    pass
                connection.recv(65536)
                connection.sendall(answer)

        threading.Thread(target=talk, daemon=True).start()
        return listening.getsockname()[1]

    yield serve
    for listening in sockets:
        listening.close()


def ended(port):
    began = []
    return stream("127.0.0.1", port, lambda: began.append(True)), len(began)


@pytest.mark.parametrize(
    ("answer", "how"),
    [
        (head(200) + DONE, "finished"),
        (head(503), "turned away"),
        (head(500), "status 500"),
        (head(404), "status 404"),
        (b"", "RemoteDisconnected Remote end closed connection without response"),
        (head(200), "cut off"),
        (head(200) + DONE[:20], "JSONDecodeError"),
    ],
)
def test_what_a_server_does_with_a_request_that_it_took(served, answer, how):
    got, _ = ended(served(answer))
    assert got.startswith(how)


def test_a_port_that_nothing_listens_on_turns_away():
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
    assert ended(port) == ("turned away", 0)


def test_a_stream_begins_with_its_first_event(served):
    assert ended(served(head(200) + DONE)) == ("finished", 1)
    assert ended(served(head(200))) == ("cut off", 0)
