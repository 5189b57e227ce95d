"""The outcomes of a transaction."""

from typing import Final, Literal

Outcome = Literal["commit", "rollback", "unknown"]
"""`unknown` leaves the transaction to check-back."""

OUTCOMES: Final = frozenset({"commit", "rollback", "unknown"})
