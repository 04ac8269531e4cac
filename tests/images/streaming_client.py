# SPDX-License-Identifier: Apache-2.0
"""A client that streams chats one after the other until a file appears, and counts how they end.

Usage: python3 streaming_client.py HOST PORT STOP_FILE

Prints one JSON object: streams that were finished, that were broken after their first byte, and
requests that were turned away before it (refused, or answered with a status that is not 200).
"""

import http.client
import json
import os
import sys
import time

BODY = {
    "model": "demo",
    "messages": [{"role": "user", "content": "class Stack:\n    def push(self, item):"}],
    "max_tokens": 64,
    "min_tokens": 64,
    "temperature": 0,
    "stream": True,
}


def stream(host, port):
    """ "finished", "turned away", or what broke the stream."""
    connection = http.client.HTTPConnection(host, port, timeout=300)
    try:
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/chat/completions", json.dumps(BODY), headers)
        answer = connection.getresponse()
        if answer.status != 200:
            return "turned away"
    except (OSError, http.client.HTTPException):
        return "turned away"
    reason = None
    try:
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
            for choice in event["choices"]:
                reason = choice.get("finish_reason") or reason
    except (OSError, http.client.HTTPException) as error:
        return f"{type(error).__name__} {error}"
    finally:
        connection.close()
    return "cut off"


def main():
    host, port, stop = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    seen = {"finished": 0, "turned away": 0, "broken": []}
    end = time.monotonic() + 3000
    while time.monotonic() < end and not os.path.exists(stop):
        how = stream(host, port)
        if how in seen:
            seen[how] += 1
        else:
            seen["broken"].append(how)
        if how != "finished":
            time.sleep(0.2)
    print(json.dumps(seen))


if __name__ == "__main__":
    main()
