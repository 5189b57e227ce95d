"""A check endpoint that gives every check the same answer, for trying halfway without a service."""

from __future__ import annotations

import json
import threading
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final, Self

import structlog

log = structlog.get_logger(__name__)

HOST: Final = "127.0.0.1"
_MAX_CHECK_BYTES: Final = 64 * 1024 * 1024
_IDLE_S: Final = 60.0


class CheckEcho:
    """A context manager that answers checks on a local port. Raises OSError if it cannot listen on the port."""

    def __init__(self, outcome: str, port: int) -> None:
        """Listen at once. Checks wait until the context is entered."""

        class Handler(_Handler):
            answered_outcome = outcome

        self._server = ThreadingHTTPServer((HOST, port), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, name="halfway-check-echo", daemon=True)
        self.url = f"http://{HOST}:{self._server.server_port}/check"

    def __enter__(self) -> Self:
        """Start to answer."""
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Close the port."""
        self._server.shutdown()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = _IDLE_S
    answered_outcome: str

    def do_POST(self) -> None:
        """Answer one check. Any other request gets 400."""
        length = self.headers.get("Content-Length", "")
        if not (length.isascii() and length.isdecimal() and int(length) <= _MAX_CHECK_BYTES):
            self.send_error(HTTPStatus.BAD_REQUEST)
            return
        try:
            check = json.loads(self.rfile.read(int(length)))
        except (ValueError, RecursionError):
            check = None
        if not isinstance(check, dict):
            self.send_error(HTTPStatus.BAD_REQUEST)
            return
        # The nonce, if the check has one, binds the answer to the check.
        answer = {"outcome": self.answered_outcome} | {name: check[name] for name in ("nonce",) if name in check}
        body = json.dumps(answer).encode()
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
        log.info("check_answered", id=check.get("id"), group=check.get("group"), outcome=self.answered_outcome)

    def log_message(self, *_: Any) -> None:
        """Log nothing: `check_answered` is logged instead."""
