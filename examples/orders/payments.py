"""The payments of the demo: the answers of a card network and a bank, and their delays."""

import asyncio
import sqlite3
import time

SETTLES_AFTER_S = 1.5
"""The duration of a bank transfer."""
LATE_S = 4.0
"""The duration of the slowest card payment, which is longer than halfway waits."""
PAID_BY = {"card": "paid", "card-late": "paid", "card-declined": "failed"}
"""The state of an order by its payment. With any other payment, the order is `awaiting`."""
_SETTLE_TRANSFERS = (
    "UPDATE orders SET state = CASE payment WHEN 'transfer' THEN 'paid' ELSE 'failed' END"
    " WHERE state = 'awaiting' AND payment LIKE 'transfer%' AND placed_at < ?"
)


async def charge(payment: str) -> str:
    """Return the state of an order after this payment."""
    await asyncio.sleep(LATE_S if payment == "card-late" else 0)
    return PAID_BY.get(payment, "awaiting")


def settle_transfers(connection: sqlite3.Connection) -> None:
    """Record the results of bank transfers, which are known after a while. A person settles invoices."""
    connection.execute(_SETTLE_TRANSFERS, (time.time() - SETTLES_AFTER_S,))
