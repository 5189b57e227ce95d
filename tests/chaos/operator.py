"""An operator for parked transactions: ends them by the producers' database, or resumes them."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterable

from tests.chaos.caller import Caller
from tests.chaos.decisions import Decisions


class Operator:
    """Works at intervals, and leaves some transactions for later."""

    def __init__(self, caller: Caller, decisions: Decisions, chance: random.Random) -> None:
        self._caller = caller
        self._decisions = decisions
        self._chance = chance
        self.resumed = 0

    async def run(self, interval_s: float) -> None:
        """Run until cancelled."""
        while True:
            await asyncio.sleep(interval_s)
            answer = await self._caller.persist("GET", "/transactions?state=parked&limit=200")
            listed = [transaction["id"] for transaction in answer.body.get("transactions") or ()]
            self._chance.shuffle(listed)
            a_third = len(listed) // 3
            await asyncio.gather(*map(self._resume, listed[:a_third]), self.end(listed[a_third : 2 * a_third]))

    async def _resume(self, transaction: str) -> None:
        await self._caller.persist("POST", f"/transactions/{transaction}/resume")
        self.resumed += 1

    async def end(self, transactions: Iterable[str]) -> None:
        """End them by the database's outcome; an unknown transaction is rolled back."""
        await asyncio.gather(
            *(
                self._caller.end(name, self._decisions.decide(name, "rollback"), group=None, by="operator")
                for name in list(transactions)
            )
        )
