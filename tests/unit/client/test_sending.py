"""A commit with messages never contradicts its database, for every exception and every time of a check."""

from collections.abc import Callable, Iterable
from typing import ParamSpec

import pytest

from halfway.client import Message, Outcome
from halfway.client.barrier import LateTransactionError
from halfway.client.barrier.drivers import carry_out
from halfway.client.producer.transaction import Sending
from tests.support.ids import new_id
from tests.unit.client.test_barrier import Shop, check_of

P = ParamSpec("P")
MOMENTS = [f"{when} {step}" for step in ("insert", "prepare", "commit", "end") for when in ("before", "after")]


class Story:
    """One commit, with a check at one moment and an interrupt at another."""

    def __init__(self, shop: Shop, check_at: str | None, interrupt_at: str | None) -> None:
        self._shop = shop
        self._check_at = check_at
        self._interrupt_at = interrupt_at
        self.sending = Sending(self)
        self.sending.add(Message(topic="orders", value="v"))
        self.prepared = False
        self.verdicts: list[Outcome] = []

    def play(self) -> None:
        with self._shop.begin() as connection:
            connection.isolation_level = None
            connection.execute("BEGIN")
            connection.execute("INSERT INTO orders VALUES (1)")
            insert = self._step("insert", lambda transaction_id: self._shop.barrier.write(connection, transaction_id))
            insert(self.sending.id)
            self.sending.commit(
                self,
                insert=insert,
                still_has=lambda transaction_id: carry_out(self._shop.barrier.still_has(transaction_id), connection),
                commit=self._step("commit", connection.commit),
                rollback=connection.rollback,
                confirm=True,
            )

    def new_id(self) -> str:
        return new_id()

    def prepare(
        self,
        messages: Iterable[Message],
        *,
        id: str,  # noqa: A002 - the port's
        new_id: bool,
        keep: bool,
    ) -> None:
        self._step("prepare", lambda: setattr(self, "prepared", True))()

    def begin_end(
        self,
        id: str,  # noqa: A002 - the port's
        outcome: Outcome,
        *,
        remark: str | None = None,
    ) -> Callable[[], None]:
        self._step("end", lambda: self.verdicts.append(outcome))()
        return lambda: None

    def check(self) -> None:
        if self.prepared:
            self.verdicts.append(self._shop.barrier.decide(check_of(self.sending.id)))

    def _step(self, name: str, call: Callable[P, None]) -> Callable[P, None]:
        def step(*arguments: P.args, **named: P.kwargs) -> None:
            self._reach(f"before {name}")
            call(*arguments, **named)
            self._reach(f"after {name}")

        return step

    def _reach(self, moment: str) -> None:
        if moment == self._check_at:
            self.check()
        if moment == self._interrupt_at:
            raise KeyboardInterrupt


@pytest.fixture
def orders(shop: Shop) -> Callable[[], int]:
    def count() -> int:
        with shop.begin() as connection:
            return int(connection.execute("SELECT count(*) FROM orders").fetchone()[0])

    with shop.begin() as connection:
        connection.execute("CREATE TABLE orders (id int)")
    return count


@pytest.mark.parametrize("interrupt_at", [None, *MOMENTS])
def test_database_and_verdicts_agree(shop: Shop, orders: Callable[[], int], interrupt_at: str | None) -> None:
    committed = 0
    for check_at in (None, "before commit", "after commit", "after end"):
        story = Story(shop, check_at, interrupt_at)
        try:
            story.play()
        except KeyboardInterrupt:
            assert interrupt_at is not None
        story.check()
        certain = {verdict for verdict in story.verdicts if verdict != "unknown"}
        now = orders() - committed
        committed += now
        assert certain == ({"commit"} if now else {"rollback"} if story.prepared else set()), (check_at, story.verdicts)
        if not interrupt_at:
            assert now == 1


def test_what_a_check_has_rolled_back_is_not_prepared(shop: Shop, orders: Callable[[], int]) -> None:
    story = Story(shop, None, None)
    assert shop.barrier.decide(check_of(story.sending.id)) == "rollback"
    with pytest.raises(LateTransactionError):
        story.play()
    assert (orders(), story.prepared) == (0, False)
