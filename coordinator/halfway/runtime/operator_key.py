"""The first operator's key among the settings: as a value, or in a file that a secret store mounts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from halfway.domain.keys import kind_in
from halfway.domain.principal import PrincipalKind

if TYPE_CHECKING:
    from halfway.runtime.settings import Settings


def first_operator_key(settings: Settings) -> str | None:
    """Return the key of the first operator, None if it is not set; ValueError if its file cannot be read."""
    if settings.operator_key is not None:
        return settings.operator_key.get_secret_value()
    if settings.operator_key_file is None:
        return None
    try:
        return settings.operator_key_file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(
            f"operator_key_file {str(settings.operator_key_file)!r} cannot be read: {type(error).__name__}"
        ) from None


def demand_operator_key_fits(settings: Settings) -> None:
    """Raise ValueError, never with the key in it, for a key that is given twice, no operator's, or of no use."""
    if settings.operator_key is not None and settings.operator_key_file is not None:
        raise ValueError("operator_key and operator_key_file are both set: set one of them")
    key = first_operator_key(settings)
    if key is None:
        return
    if kind_in(key) is not PrincipalKind.OPERATOR:
        raise ValueError("operator_key is no operator's key of halfway: make one with halfway keys generate")
    if not settings.master_secrets:
        raise ValueError("operator_key is set without master_secret, so that nobody is asked for a key: set both")
