"""Known secrets and payloads, and looking for them where they must not be, however they are written."""

import re
from base64 import b64encode
from collections.abc import Iterator, Mapping
from urllib.parse import quote

_LEAST = 8
PAYLOAD = "canary-payload-7d20e1"
MARKED = ({"name": "marked", "value": PAYLOAD},)
"""Headers of a message whose payload is looked for wherever it must not be."""
_SECRET_SETTING = re.compile(r"SECRET(_PREVIOUS)?$|CREDENTIAL|OPERATOR_KEY$|PASSWORD")
_A_SECRET = re.compile(rb"hw_[gor]_[0-9A-Za-z]{12}_[0-9A-Za-z]{43}|whsec_[0-9A-Za-z+/]{20}")
"""What a key or a check secret looks like."""


def _forms(value: bytes) -> Iterator[bytes]:
    assert len(value) >= _LEAST
    yield value.hex().encode()
    yield value
    yield quote(value, safe="").encode()
    for shift in range(3):  # what stands before it decides where its bytes fall in base64
        encoded = b64encode(b"\0" * shift + value)
        inner = encoded[4 if shift else 0 : len(encoded) - 4]
        yield inner
        yield inner.replace(b"+", b"-").replace(b"/", b"_")


class Canaries:
    """Values by name, of which no byte may appear in what others see."""

    def __init__(self, values: Mapping[str, str | bytes]) -> None:
        self._forms = {
            name: tuple(_forms(value.encode() if isinstance(value, str) else value)) for name, value in values.items()
        }

    def add(self, name: str, value: str) -> str:
        """Add a value that was just made, and return it."""
        self._forms[name] = tuple(_forms(value.encode()))
        return value

    def found_in(self, seen: str | bytes) -> list[str]:
        """Return the names of values that are in a text: as they are, in hexadecimal, in base64, or quoted."""
        data = seen.encode("utf-8", "surrogateescape") if isinstance(seen, str) else seen
        lower = data.lower()
        return [
            name
            for name, (hexadecimal, *forms) in self._forms.items()
            if hexadecimal in lower or any(form in data for form in forms)
        ]


KNOWN = Canaries({"a payload": PAYLOAD})
"""The payload of all messages that carry the marker, and the secrets of all coordinators so far."""


def know_secrets(settings: Mapping[str, str]) -> None:
    """Look from now on for the secrets among a coordinator's settings."""
    for name, value in settings.items():
        if value and _SECRET_SETTING.search(name):
            KNOWN.add(f"{name}: {value}", value)


def leaks_in(seen: bytes) -> list[str]:
    """Name each known payload and secret in what others see, and each text that looks like a key or a check secret."""
    shapes = [f"what looks like a secret: {found[0].decode()}" for found in _A_SECRET.finditer(seen)]
    return KNOWN.found_in(seen) + shapes


def refuse_leaks(seen: bytes) -> None:
    """Raise AssertionError with the text if a payload or a secret is in it."""
    found = leaks_in(seen)
    assert not found, (found, seen)
