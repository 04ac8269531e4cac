# SPDX-License-Identifier: Apache-2.0
"""A client that streams chats one after the other until FOLDER/stop appears, and counts how they end.

Usage: python3 streaming_client.py HOST PORT FOLDER

FOLDER/seen always has one JSON object: streams that began to answer, that were finished, requests that
were turned away (the connection refused, or status 503), and how everything else ended: broken. The
same is printed at the end.
"""

import http.client
import json
import sys
import time
from pathlib import Path

BODY = {
    "model": "demo",
    "messages": [{"role": "user", "content": "class Stack:\n    def push(self, item):"}],
    "max_tokens": 64,
    "min_tokens": 64,
    "temperature": 0,
    "stream": True,
}


def stream(host, port, began):
    """ "finished", "turned away", or what broke the stream; calls began() at its first token."""
    connection = http.client.HTTPConnection(host, port, timeout=300)
    reason = None
    try:
        try:
            connection.connect()
        except ConnectionRefusedError:
            return "turned away"
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/chat/completions", json.dumps(BODY), headers)
        answer = connection.getresponse()
        if answer.status == 503:
            return "turned away"
        if answer.status != 200:
            return f"status {answer.status}"
        for line in answer:
            text = line.decode().strip()
            if not text.startswith("data:"):
                continue
            data = text[len("data:") :].strip()
            if data == "[DONE]":
                return "finished" if reason == "length" else f"finish reason {reason}"
            event = json.loads(data)
            if "error" in event:
                return f"error {event['error']}"
            if began is not None:
                began()
                began = None
            for choice in event["choices"]:
                reason = choice.get("finish_reason") or reason
    except (OSError, ValueError, http.client.HTTPException) as error:
        return f"{type(error).__name__} {error}"
    finally:
        connection.close()
    return "cut off"


def main():
    host, port, folder = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    seen = {"began": 0, "finished": 0, "turned away": 0, "broken": []}

    def tell():
        # Renamed, so that a reader never sees half of it.
        (folder / "seen.part").write_text(json.dumps(seen))
        (folder / "seen.part").rename(folder / "seen")

    def began():
        seen["began"] += 1
        tell()

    tell()
    end = time.monotonic() + 3000
    while time.monotonic() < end and not (folder / "stop").exists():
        how = stream(host, port, began)
        if how in seen:
            seen[how] += 1
        else:
            seen["broken"].append(how)
        tell()
        if how != "finished":
            time.sleep(0.2)
    print(json.dumps(seen))


if __name__ == "__main__":
    main()
