"""TLS for a listening port. Certificates are read again when their files change."""

from __future__ import annotations

import asyncio
import ssl
from typing import TYPE_CHECKING, Final

import structlog

from halfway.domain.errors import ConfigurationError

if TYPE_CHECKING:
    from pathlib import Path

log = structlog.get_logger(__name__)

_POLL_S: Final = 2.0


class ServerTls:
    """The certificate of a port and the authorities that it trusts. Each handshake uses the files as last read."""

    def __init__(self, *, certificate: Path, key: Path, client_authorities: Path | None = None) -> None:
        """Read the files; raise ConfigurationError if they cannot be used.

        With `client_authorities` a client may present a certificate of one of them; without one it shows a key.
        """
        self._certificate = certificate
        self._key = key
        self._client_authorities = client_authorities
        self._versions = self._file_versions()
        self._current = self._read()
        self.context = self._read()
        """The context of the port. It switches each handshake to the files as last read."""
        self.context.sni_callback = self._hand_over

    def _hand_over(self, handshake: ssl.SSLObject, _name: str, _context: ssl.SSLContext) -> None:
        handshake.context = self._current

    def _read(self) -> ssl.SSLContext:
        try:
            context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=self._client_authorities)
            # Without a password, OpenSSL would prompt for the password of an encrypted key and block.
            context.load_cert_chain(self._certificate, self._key, password="")
        except (OSError, ValueError) as error:
            raise ConfigurationError(
                f"cannot use the certificate {str(self._certificate)!r}, its key, or the client authorities: {error}"
            ) from None
        context.verify_mode = ssl.CERT_NONE if self._client_authorities is None else ssl.CERT_OPTIONAL
        # A resumed session would not be verified against the authorities that are trusted now. TLS 1.2 resumes sessions
        # without tickets too, which Python cannot switch off.
        context.options |= ssl.OP_NO_TICKET
        context.num_tickets = 0
        if self._client_authorities is not None:
            context.minimum_version = ssl.TLSVersion.TLSv1_3
        return context

    def _file_versions(self) -> list[tuple[int, int]]:
        files = (self._certificate, self._key, self._client_authorities)
        return [(file.stat().st_mtime_ns, file.stat().st_ino) for file in files if file is not None]

    async def watch(self) -> None:
        """Read the files again whenever they change. If they cannot be used, keep the previous ones."""
        while True:
            await asyncio.sleep(_POLL_S)
            self.reload_if_changed()

    def reload_if_changed(self) -> None:
        """Read the files again if they have changed."""
        try:
            versions = self._file_versions()
            if versions == self._versions:
                return
            self._current = self._read()
        except (OSError, ConfigurationError) as error:
            log.warning("certificate_not_read", certificate=str(self._certificate), error=str(error))
            return
        self._versions = versions
        log.info("certificate_read", certificate=str(self._certificate))
