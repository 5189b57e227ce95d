"""The payments of the demo: what a card network and a bank answer, and when."""

import asyncio
import sqlite3
import time

SETTLES_AFTER_S = 1.5
"""A bank transfer."""
LATE_S = 4.0
"""The slowest card, which takes longer than halfway waits."""
PAID_BY = {"card": "paid", "card-late": "paid", "card-declined": "failed"}
"""States of an order; one with any other payment awaits it."""
_SETTLE_TRANSFERS = (
    "UPDATE orders SET state = CASE payment WHEN 'transfer' THEN 'paid' ELSE 'failed' END"
    " WHERE state = 'awaiting' AND payment LIKE 'transfer%' AND placed_at < ?"
)


async def charge(payment: str) -> str:
    """Return the state of an order that is paid for in this way."""
    await asyncio.sleep(LATE_S if payment == "card-late" else 0)
    return PAID_BY.get(payment, "awaiting")


def settle_transfers(connection: sqlite3.Connection) -> None:
    """Note what became of each transfer, as a bank tells after a while; of an invoice a person finds out."""
    connection.execute(_SETTLE_TRANSFERS, (time.time() - SETTLES_AFTER_S,))
