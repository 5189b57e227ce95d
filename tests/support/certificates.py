"""Certificate authorities and certificates for tests of TLS, made when a test asks for them."""

import datetime as dt
import ipaddress
import ssl
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

_LIFETIME = dt.timedelta(days=2)


class Authority:
    """A certificate authority; `file` holds its certificate as PEM."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder = folder
        self._name = name
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._subject = x509.Name.from_rfc4514_string(f"CN={name}")
        self._identifier = x509.SubjectKeyIdentifier.from_public_key(self._key.public_key())
        usage = x509.KeyUsage(
            digital_signature=True,
            key_cert_sign=True,
            crl_sign=True,
            content_commitment=False,
            key_encipherment=False,
            data_encipherment=False,
            key_agreement=False,
            encipher_only=False,
            decipher_only=False,
        )
        certificate = (
            self._begun(self._subject, self._key.public_key())
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(usage, critical=True)
            .add_extension(self._identifier, critical=False)
            .sign(self._key, hashes.SHA256())
        )
        self.file = folder / f"{name}.pem"
        self.file.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))

    def sign(self, name: str, subject: str, alternatives: str, passphrase: bytes = b"") -> tuple[Path, Path]:
        """Write a certificate and its key as PEM, the key under a passphrase if there is one, and return both files.

        `subject` is written as in RFC 4514; `alternatives` as `DNS:shop.svc,URI:spiffe://acme/shop,IP:127.0.0.1`.
        """
        key = ec.generate_private_key(ec.SECP256R1())
        issuer = x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(self._identifier)
        certificate = (
            self._begun(x509.Name.from_rfc4514_string(subject), key.public_key())
            .add_extension(x509.SubjectAlternativeName(_names(alternatives)), critical=False)
            .add_extension(issuer, critical=False)
            .sign(self._key, hashes.SHA256())
        )
        files = self._folder / f"{self._name}-{name}.pem", self._folder / f"{self._name}-{name}.key"
        files[0].write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        hidden = serialization.BestAvailableEncryption(passphrase) if passphrase else serialization.NoEncryption()
        files[1].write_bytes(key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, hidden))
        return files

    def server(self, alternatives: str) -> ssl.SSLContext:
        """Give the context of a server with a certificate for these names."""
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(*self.sign("server", "CN=server", alternatives))
        return context

    def trusted(self, own: tuple[Path, Path] | None = None) -> ssl.SSLContext:
        """Give a client's context that trusts this authority, and shows a certificate if it has one."""
        context = ssl.create_default_context(cafile=self.file)
        if own is not None:
            context.load_cert_chain(*own)
        return context

    def _begun(self, subject: x509.Name, key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
        now = dt.datetime.now(dt.UTC)
        return (
            x509.CertificateBuilder(issuer_name=self._subject, subject_name=subject, public_key=key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - _LIFETIME)
            .not_valid_after(now + _LIFETIME)
        )


def _names(alternatives: str) -> list[x509.GeneralName]:
    names: list[x509.GeneralName] = []
    for alternative in alternatives.split(","):
        kind, value = alternative.split(":", 1)
        if kind == "IP":
            names.append(x509.IPAddress(ipaddress.ip_address(value)))
        else:
            names.append({"DNS": x509.DNSName, "URI": x509.UniformResourceIdentifier}[kind](value))
    return names
