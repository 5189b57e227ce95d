"""The authorities that a port trusts: each handshake uses the current files."""

import shutil
import ssl
import subprocess
import sys
from pathlib import Path

import pytest

from halfway.http.requests.authentication import names_in
from halfway.http.server.server import ServerTls
from tests.support.certificates import Authority
from tests.support.waiting import GENEROUS_S


class Port:
    """A port with its files, and a client with a certificate."""

    def __init__(self, folder: Path) -> None:
        self.authority, self.another = Authority(folder, "one"), Authority(folder, "another")
        certificate, key = own = self.authority.sign("own", "CN=localhost", "DNS:localhost")
        self.authorities = folder / "authorities.pem"
        shutil.copy(self.authority.file, self.authorities)
        self.tls = ServerTls(certificate=certificate, key=key, client_authorities=self.authorities)
        self.client = self.authority.trusted(own)

    def names(self, session: ssl.SSLSession | None = None) -> tuple[tuple[str, ...], ssl.SSLSession | None]:
        """Connect, and return the client's names according to the port, and the session; SSLError if it refuses."""
        there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
        client = self.client.wrap_bio(back, there, server_hostname="localhost", session=session)
        server = self.tls.context.wrap_bio(there, back, server_side=True)
        waiting = [client, server]
        for _ in range(10):
            for side in list(waiting):
                try:
                    side.do_handshake()
                    waiting.remove(side)
                except ssl.SSLWantReadError:
                    continue
        assert not waiting
        server.write(b"x")
        client.read(1)
        return names_in(server.getpeercert()), client.session

    def trust(self, authorities: bytes) -> None:
        self.authorities.write_bytes(authorities)
        self.tls.reload_if_changed()


@pytest.fixture
def port(tmp_path: Path) -> Port:
    return Port(tmp_path)


def test_a_certificate_says_who_calls_and_none_is_no_error(port: Port) -> None:
    assert port.names()[0] == ("DNS:localhost", "subject:CN=localhost")
    port.client = port.authority.trusted()
    assert port.names()[0] == ()


def test_a_session_does_not_outlive_the_authority_that_vouched_for_it(port: Port) -> None:
    """A resumed session would skip the verification of the certificate, so sessions are not resumed."""
    _, session = port.names()
    port.trust(port.another.file.read_bytes())
    with pytest.raises(ssl.SSLError):
        port.names(session)


def test_where_certificates_are_asked_for_tls_1_2_is_not_spoken(port: Port) -> None:
    """TLS 1.2 resumes sessions, and this cannot be switched off."""
    port.client.maximum_version = ssl.TLSVersion.TLSv1_2
    with pytest.raises(ssl.SSLError):
        port.names()


def test_files_that_cannot_be_used_change_nothing(port: Port) -> None:
    for broken in (b"", b"no certificate", port.another.file.read_bytes()[:200]):
        port.trust(broken)
        assert port.names()[0] == ("DNS:localhost", "subject:CN=localhost")
    port.authorities.unlink()
    port.tls.reload_if_changed()
    assert port.names()[0] == ("DNS:localhost", "subject:CN=localhost")


def test_a_key_with_a_passphrase_is_refused_and_nobody_is_asked_for_it(tmp_path: Path) -> None:
    """OpenSSL would prompt on the terminal or standard input, and block the event loop."""
    certificate, key = Authority(tmp_path, "one").sign("own", "CN=localhost", "DNS:localhost", passphrase=b"secret")
    load = (
        "from pathlib import Path; from halfway.http.server.server import ServerTls; "
        f"ServerTls(certificate=Path({str(certificate)!r}), key=Path({str(key)!r}))"
    )
    loading = subprocess.Popen(
        [sys.executable, "-c", load], stdin=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    )
    try:
        assert loading.wait(timeout=GENEROUS_S) == 1
        assert loading.stderr is not None
        assert b"ConfigurationError" in loading.stderr.read()
    finally:
        loading.kill()
        loading.communicate()
