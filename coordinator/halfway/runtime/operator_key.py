"""The first operator's key from the settings: a value, or a file that a secret store mounts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from pydantic import SecretStr

from halfway.domain.keys import kind_in
from halfway.domain.principal import PrincipalKind


class KeySettings(Protocol):
    """The settings that hold the key, or depend on it."""

    operator_key: SecretStr | None
    operator_key_file: Path | None

    @property
    def master_secrets(self) -> Sequence[bytes]:
        """The secrets that keys are derived from; none if no keys are required."""


def first_operator_key(settings: KeySettings) -> str | None:
    """Return the first operator's key, None if it is not set; raise ValueError if its file cannot be read."""
    if settings.operator_key is not None:
        return settings.operator_key.get_secret_value()
    if settings.operator_key_file is None:
        return None
    try:
        return settings.operator_key_file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(
            f"cannot read operator_key_file {str(settings.operator_key_file)!r}: {type(error).__name__}"
        ) from None


def demand_operator_key_fits(settings: KeySettings) -> None:
    """Raise ValueError if the key is set twice, is not an operator's, or has no effect. The error never shows it."""
    if settings.operator_key is not None and settings.operator_key_file is not None:
        raise ValueError("operator_key and operator_key_file are both set: set one of them")
    key = first_operator_key(settings)
    if key is None:
        return
    if kind_in(key) is not PrincipalKind.OPERATOR:
        raise ValueError("operator_key is not an operator's key of halfway: make one with halfway keys generate")
    if not settings.master_secrets:
        raise ValueError("operator_key has no effect without master_secret, because no keys are required: set both")
