"""The first operator's key, from the settings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from pydantic import SecretStr

from halfway.domain.keys import kind_in
from halfway.domain.principal import PrincipalKind
from halfway.runtime.secret_files import secret_name


class KeySettings(Protocol):
    """The settings that hold the key, or depend on it."""

    operator_key: SecretStr | None

    @property
    def master_secrets(self) -> Sequence[bytes]:
        """The secrets that keys are derived from; none if no keys are required."""


def operator_key_fault(settings: KeySettings) -> str | None:
    """Return why the key is not an operator's, or has no effect, or None. The text never shows it."""
    if settings.operator_key is None:
        return None
    named = secret_name(settings, "operator_key")
    if kind_in(settings.operator_key.get_secret_value()) is not PrincipalKind.OPERATOR:
        return f"{named} is not an operator's key of halfway: make one with halfway keys generate"
    if not settings.master_secrets:
        return f"{named} has no effect without master_secret, because no keys are required: set both"
    return None
