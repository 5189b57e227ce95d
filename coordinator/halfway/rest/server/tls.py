"""TLS on a listening port: certificates that are read again when their files change, and the names in clients' own."""

from __future__ import annotations

import asyncio
import ssl
from typing import TYPE_CHECKING, Any, Final

import structlog

from halfway.domain.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

log = structlog.get_logger(__name__)

_LOOK_EVERY_S: Final = 2.0
_SHORT: Final = {
    "commonName": "CN",
    "organizationName": "O",
    "organizationalUnitName": "OU",
    "countryName": "C",
    "stateOrProvinceName": "ST",
    "localityName": "L",
    "domainComponent": "DC",
    "userId": "UID",
    "streetAddress": "street",
}
_ALTERNATIVE: Final = ("DNS", "URI", "email")


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


def names_in(certificate: Mapping[str, Any] | None) -> tuple[str, ...]:
    """Return what a certificate calls its holder: `DNS:…`, `URI:…`, `email:…`, and `subject:…` as in RFC 2253."""
    if not certificate:
        return ()
    alternative = [f"{kind}:{value}" for kind, value in certificate.get("subjectAltName", ()) if kind in _ALTERNATIVE]
    subject = ",".join(_relative_names(certificate.get("subject", ())))
    return (*alternative, f"subject:{subject}") if subject else tuple(alternative)


def _relative_names(subject: Any) -> Iterator[str]:
    for relative in reversed(subject):
        yield "+".join(f"{_SHORT.get(name, name)}={_escaped(value)}" for name, value in relative)


def _escaped(value: str) -> str:
    escaped = "".join(f"\\{char}" if char in ',+"\\<>;' else char for char in value)
    if escaped.startswith(("#", " ")):
        escaped = "\\" + escaped
    return f"{escaped[:-1]}\\ " if value.endswith(" ") and len(value) > 1 else escaped
