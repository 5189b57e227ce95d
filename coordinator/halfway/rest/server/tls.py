"""TLS on a listening port: certificates that are read again when their files change."""

from __future__ import annotations

import asyncio
import ssl
from typing import TYPE_CHECKING, Final

import structlog

from halfway.domain.errors import ConfigurationError

if TYPE_CHECKING:
    from pathlib import Path

log = structlog.get_logger(__name__)

_LOOK_EVERY_S: Final = 2.0


class ServerTls:
    """What a port shows and whom it trusts. Each handshake takes the files as they were last read."""

    def __init__(self, *, certificate: Path, key: Path, client_authorities: Path | None = None) -> None:
        """Read the files; ConfigurationError if they do not fit.

        With `client_authorities` a client may show a certificate of one of them; one without shows a key.
        """
        self._certificate = certificate
        self._key = key
        self._client_authorities = client_authorities
        self._seen = self._changed_at()
        self._current = self._read()
        self.context = self._read()
        """For the port: it hands each handshake over to what was read last."""
        self.context.sni_callback = self._hand_over

    def _hand_over(self, handshake: ssl.SSLObject, _name: str, _context: ssl.SSLContext) -> None:
        handshake.context = self._current

    def _read(self) -> ssl.SSLContext:
        try:
            context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=self._client_authorities)
            # Without a password OpenSSL would ask for that of an encrypted key, and wait.
            context.load_cert_chain(self._certificate, self._key, password="")
        except (OSError, ValueError) as error:
            raise ConfigurationError(
                f"certificate {str(self._certificate)!r}, its key or clients' authorities cannot be used: {error}"
            ) from None
        context.verify_mode = ssl.CERT_NONE if self._client_authorities is None else ssl.CERT_OPTIONAL
        # A resumed session would not be judged by the authorities that are trusted now. Those of TLS 1.2 are resumed
        # without tickets too, which Python cannot switch off.
        context.options |= ssl.OP_NO_TICKET
        context.num_tickets = 0
        if self._client_authorities is not None:
            context.minimum_version = ssl.TLSVersion.TLSv1_3
        return context

    def _changed_at(self) -> list[tuple[int, int]]:
        files = (self._certificate, self._key, self._client_authorities)
        return [(file.stat().st_mtime_ns, file.stat().st_ino) for file in files if file is not None]

    async def watch(self) -> None:
        """Read the files again when they have changed; if they cannot be used, what was used before stays."""
        while True:
            await asyncio.sleep(_LOOK_EVERY_S)
            self.look()

    def look(self) -> None:
        """Read the files again if they have changed."""
        try:
            seen = self._changed_at()
            if seen == self._seen:
                return
            self._current = self._read()
        except (OSError, ConfigurationError) as error:
            log.warning("certificate_not_read", certificate=str(self._certificate), error=str(error))
            return
        self._seen = seen
        log.info("certificate_read", certificate=str(self._certificate))
