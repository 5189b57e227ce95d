"""How a transaction can end."""

from typing import Final, Literal

Outcome = Literal["commit", "rollback", "unknown"]
"""`unknown` leaves it to check-back."""

OUTCOMES: Final = frozenset({"commit", "rollback", "unknown"})
