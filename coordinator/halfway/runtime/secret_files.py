"""Secrets that are in files, such as those that a secret store mounts: each secret `x` has a setting `x_file`."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Final

SUFFIX: Final = "_file"
KAFKA_SECRETS: Final = (
    "sasl.password",
    "sasl.oauthbearer.config",
    "sasl.oauthbearer.client.secret",
    "sasl.oauthbearer.assertion.private.key.passphrase",
    "sasl.oauthbearer.assertion.private.key.pem",
    "ssl.key.password",
    "ssl.key.pem",
    "ssl.keystore.password",
)
"""The properties of librdkafka that are secrets, and have no property of their own that names a file."""
_KAFKA_SUFFIX: Final = ".file"


def secret_name(settings: object, name: str) -> str:
    """Return the setting that gave a secret, for an error: that of its file, with the path, if it has one."""
    path = getattr(settings, name + SUFFIX, None)
    return name if path is None else f"{name}{SUFFIX} {str(path)!r}"


def content_of(path: str) -> str:
    """Return the secret in a file, without white space around it; raise ValueError with the reason if that fails.

    A master secret may be any bytes. Whatever else is not text is refused where it is used.
    """
    try:
        content = Path(path).read_bytes()
    except (OSError, ValueError) as error:  # ValueError: the path has a null character
        raise ValueError(getattr(error, "strerror", None) or "it is not a path") from None
    return content.strip().decode("utf-8", "surrogateescape")


def read_secrets(values: Mapping[str, Any], secrets: Collection[str]) -> tuple[dict[str, Any], list[str]]:
    """Return the values of settings with each secret that is in a file, and what is wrong with the others.

    The setting that names a file stays, so that its path is validated and shown. No text shows a secret.
    """
    found = dict(values)
    faults = [_read(found, name, name + SUFFIX, "") for name in secrets]
    if isinstance(found.get("kafka"), Mapping):
        properties = dict(found["kafka"])
        for name in KAFKA_SECRETS:
            faults.append(_read(properties, name, name + _KAFKA_SUFFIX, "kafka."))
            properties.pop(name + _KAFKA_SUFFIX, None)  # librdkafka does not know it
        found["kafka"] = properties
    return found, [fault for fault in faults if fault is not None]


def _read(values: dict[str, Any], name: str, file_name: str, section: str) -> str | None:
    path = values.get(file_name)
    if path is None:
        return None
    if values.get(name) is not None:
        return f"{section}{name} and {section}{file_name} are both set: set one of them"
    try:
        values[name] = content_of(str(path))
    except ValueError as error:
        del values[file_name]
        return f"cannot read {section}{file_name} {str(path)!r}: {error}"
    return None
