"""Ids for tests: UUIDv7 that are born in the time of the coordinator under test."""

from datetime import UTC, datetime
from uuid import uuid4

from halfway.client import transaction_id
from halfway.memory import ManualClock


def named_id(name: str) -> str:
    """Return the id for a name that is born when a manual clock starts: a test may write it in two places."""
    return transaction_id(name, ManualClock().now_ms())


def new_id() -> str:
    """Return another id at each call, born now."""
    return transaction_id(uuid4().hex, datetime.now(UTC))
