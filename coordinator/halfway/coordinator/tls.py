"""Certificates that are replaced while the process runs, and a bound on what arrives inside TLS and is no content.

OpenSSL handles messages such as KeyUpdate itself, 8 us for 27 bytes and any number of them, and no protocol sees them:
a connection that sends only these would keep the event loop busy, also without a request.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

import structlog

from halfway.coordinator.logging import LogSummary
from halfway.protocol.errors import ConfigurationError

log = structlog.get_logger(__name__)
Trust = Callable[[], ssl.SSLContext | bool]
"""Gives each new connection the context that verifies the other side; True for the system's authorities."""
_flooded: Final = LogSummary(log, "info", "tls_without_content")

FIRST_BUFFER_BYTES: Final = 16 * 1024
"""What is asked of the system to keep of a connection: all is decrypted in one turn of the event loop, in some 7 ms."""
BUFFER_BYTES: Final = 64 * 1024
"""The same once content has arrived."""
LOOK_EVERY_S: Final = 1.0
FILES_LOOK_S: Final = 2.0
_FREE_BYTES: Final = 16 * 1024
"""What may arrive between two looks without content."""
_FACTOR: Final = 3
"""Bytes for each byte of content, which holds for records of 12 bytes and more."""
_SMALL_FACTOR: Final = 32
"""The same for a little content: a record with one byte of it has 23."""
_SMALL_BYTES: Final = 64 * 1024
_TCP_INFO_BYTES: Final = 136
_RECEIVED: Final = slice(128, 136)
"""Where Linux's `tcp_info` has `tcpi_bytes_received`, an integer in the machine's order."""


class TlsFiles(ABC):
    """Certificates, keys or authorities in files, which a handshake uses as they were at most 2 s before."""

    def __init__(self, *files: Path | None) -> None:
        """Read the files, of which the first gives the others their name in the log.

        Raises ConfigurationError: they cannot be used.
        """
        self._files = [file for file in files if file is not None]
        self._versions = self._file_versions()
        self._current = self._read()
        self._look_at = time.monotonic() + FILES_LOOK_S

    @abstractmethod
    def _read(self) -> ssl.SSLContext:
        """Return a context made of the files, or raise ConfigurationError."""

    def current(self) -> ssl.SSLContext:
        """Return the context for a new connection."""
        if time.monotonic() >= self._look_at:
            self.reload_if_changed()
        return self._current

    def reload_if_changed(self) -> None:
        """Read the files again if they have changed. If they cannot be used, keep the previous ones."""
        self._look_at = time.monotonic() + FILES_LOOK_S
        try:
            versions = self._file_versions()
            if versions == self._versions:
                return
            self._current = self._read()
        except (OSError, ConfigurationError) as error:
            log.warning("certificate_not_read", certificate=str(self._files[0]), error=str(error))
            return
        self._versions = versions
        log.info("certificate_read", certificate=str(self._files[0]))

    def _file_versions(self) -> list[tuple[int, int]]:
        return [(file.stat().st_mtime_ns, file.stat().st_ino) for file in self._files]


class Authorities(TlsFiles):
    """The authorities that connections to other servers trust, in a file that a setting names."""

    def __init__(self, setting: str, file: Path) -> None:
        """Read the file; raise ConfigurationError if it has no certificate in PEM format."""
        self._setting = setting
        super().__init__(file)

    def _read(self) -> ssl.SSLContext:
        [file] = self._files
        try:
            return ssl.create_default_context(cafile=file)
        except (OSError, ValueError) as error:
            raise ConfigurationError(
                f"{self._setting} {str(file)!r} contains no certificate in PEM format: {error}"
            ) from None


def bound_receive_buffer(sock: socket.socket, size: int = FIRST_BUFFER_BYTES) -> None:
    """Let the system receive little ahead on a connection that will use TLS."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, size)


class TlsWatch:
    """Aborts a TLS connection on which much arrives that is no content. It looks every second, on Linux only."""

    def __init__(self, transport: asyncio.Transport, side: str) -> None:
        """Watch a connection from the end of its handshake on; `side` names the other side in the log."""
        self._content = 0
        """Bytes of content that have arrived."""
        self._transport = transport
        self._side = side
        self._socket: socket.socket = transport.get_extra_info("socket")
        self._seen = self._received(), 0
        self._timer = asyncio.get_running_loop().call_later(LOOK_EVERY_S, self._look)

    def note(self, size: int) -> None:
        """Count content that has arrived."""
        if not self._content:
            with suppress(OSError):
                bound_receive_buffer(self._socket, BUFFER_BYTES)
        self._content += size

    def stop(self) -> None:
        """Look no more: the connection is lost."""
        self._timer.cancel()

    def _received(self) -> int:
        """Return how many bytes have arrived in all, 0 if the system does not tell."""
        with suppress(AttributeError, OSError):
            info = self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
            return int.from_bytes(info[_RECEIVED], sys.byteorder)
        return 0

    def _look(self) -> None:
        (received, content), self._seen = self._seen, (self._received(), self._content)
        content = self._content - content
        allowed = _FREE_BYTES + _FACTOR * content + min(_SMALL_FACTOR * content, _SMALL_BYTES)
        if self._seen[0] - received > allowed:
            _flooded.note({"side": self._side})
            self._transport.abort()
        else:
            self._timer = asyncio.get_running_loop().call_later(LOOK_EVERY_S, self._look)
