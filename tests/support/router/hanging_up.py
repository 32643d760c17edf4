"""A client that hangs up as soon as all choices have ended, without waiting for `[DONE]`: PORT TRIES as arguments."""

import json
import socket
import sys

NUM_CHOICES = 16
BODY = json.dumps({"prompt": "hi", "max_tokens": 6, "stream": True, "n": NUM_CHOICES}).encode()
REQUEST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (len(BODY), BODY)


def main(port: int, tries: int) -> None:
    for _ in range(tries):
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.sendall(REQUEST)
            received = b""
            while received.count(b'"length"') < NUM_CHOICES:
                part = connection.recv(65536)
                assert part, f"the router ended the stream itself: {received[-1000:]!r}"
                received += part


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
