"""A check endpoint that gives every question the same answer: to try halfway without a service of one's own."""

from __future__ import annotations

import json
import threading
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final, Self

import structlog

log = structlog.get_logger(__name__)

HOST: Final = "127.0.0.1"
_MAX_QUESTION_BYTES: Final = 64 * 1024 * 1024
_IDLE_S: Final = 60.0


class CheckEcho:
    """Answers checks on a port of this machine while it is open; OSError if the port cannot be listened on."""

    def __init__(self, outcome: str, port: int) -> None:
        """Listen at once; questions wait until it is entered."""

        class Answer(_Answer):
            said = outcome

        self._server = ThreadingHTTPServer((HOST, port), Answer)
        self._thread = threading.Thread(target=self._server.serve_forever, name="halfway-check-echo", daemon=True)
        self.url = f"http://{HOST}:{self._server.server_port}/check"

    def __enter__(self) -> Self:
        """Begin to answer."""
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Close the port."""
        self._server.shutdown()
        self._server.server_close()


class _Answer(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = _IDLE_S
    said: str

    def do_POST(self) -> None:
        """Answer one check; any other request is 400."""
        length = self.headers.get("Content-Length", "")
        if not (length.isascii() and length.isdecimal() and int(length) <= _MAX_QUESTION_BYTES):
            self.send_error(HTTPStatus.BAD_REQUEST)
            return
        try:
            question = json.loads(self.rfile.read(int(length)))
        except (ValueError, RecursionError):
            question = None
        if not isinstance(question, dict):
            self.send_error(HTTPStatus.BAD_REQUEST)
            return
        # The nonce, if there is one, binds the answer to its question.
        answer = {"outcome": self.said} | {name: question[name] for name in ("nonce",) if name in question}
        body = json.dumps(answer).encode()
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
        log.info("check_answered", id=question.get("id"), group=question.get("group"), outcome=self.said)

    def log_message(self, *_: Any) -> None:
        """Leave the log to `check_answered`."""
