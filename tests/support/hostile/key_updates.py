"""What happens below TLS: KeyUpdate messages, which Python's ssl cannot send, and the end of a connection."""

import contextlib
import hashlib
import hmac
import socket
import ssl
import threading
from pathlib import Path

from cryptography.hazmat.primitives.ciphers.aead import AESGCM

_CIPHER = "TLS_AES_256_GCM_SHA384"
_HASH = hashlib.sha384
_RECORD = bytes([23, 3, 3])
_MESSAGE = bytes([24, 0, 0, 1, 0])
"""KeyUpdate, one byte long, without a wish for one in return."""
_HANDSHAKE = bytes([22])
_TAG_BYTES = 16


def key_updates(secret: bytes, count: int) -> bytes:
    """Return so many records with a KeyUpdate each, from a first traffic secret on (RFC 8446, 5.2 and 7.2)."""
    records = []
    inner = _MESSAGE + _HANDSHAKE
    head = _RECORD + (len(inner) + _TAG_BYTES).to_bytes(2, "big")
    for _ in range(count):
        key, nonce = _expanded(secret, "key", 32), _expanded(secret, "iv", 12)
        records.append(head + AESGCM(key).encrypt(nonce, inner, head))
        secret = _expanded(secret, "traffic upd", _HASH().digest_size)
    return b"".join(records)


def _expanded(secret: bytes, label: str, length: int) -> bytes:
    name = b"tls13 " + label.encode()
    return hmac.digest(secret, length.to_bytes(2, "big") + bytes([len(name)]) + name + b"\0\1", _HASH)[:length]


def shaken_hands(sock: socket.socket, context: ssl.SSLContext, keys: Path, *, is_server: bool = False) -> bytes:
    """Do the handshake on a blocking socket with AES-256, and return the first traffic secret of this side.

    Whatever else is sent over TLS must be encrypted with it by hand.
    """
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.keylog_filename = str(keys)
    if is_server:
        context.num_tickets = 0  # they would be encrypted with the same secret
    received, sent = ssl.MemoryBIO(), ssl.MemoryBIO()
    tls = context.wrap_bio(received, sent, server_side=is_server)
    while True:
        try:
            tls.do_handshake()
        except ssl.SSLWantReadError:
            sock.sendall(sent.read())
            received.write(sock.recv(65536))
        else:
            break
    sock.sendall(sent.read())
    cipher = tls.cipher()
    assert cipher is not None
    assert cipher[0] == _CIPHER
    name = f"{'SERVER' if is_server else 'CLIENT'}_TRAFFIC_SECRET_0"
    [secret] = [line.split()[2] for line in keys.read_text().splitlines() if line.startswith(name)]
    return bytes.fromhex(secret)


def arriving_below_tls(
    listener: socket.socket, context: ssl.SSLContext, answer: bytes = b"", asked: threading.Event | None = None
) -> bytes:
    """Answer one request as a server that never closes TLS, and return what arrives until the connection ends."""
    with listener, context.wrap_socket(listener.accept()[0], server_side=True) as encrypted:
        encrypted.recv(65536)
        if asked is not None:
            asked.set()
        encrypted.sendall(answer)
        with socket.socket(fileno=encrypted.detach()) as raw, contextlib.suppress(ConnectionResetError):
            raw.settimeout(60)
            return raw.recv(65536)
    return b""
