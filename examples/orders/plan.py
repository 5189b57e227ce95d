"""The orders of one run and their faults. The same seed gives the same plan."""

import random
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import Enum

from examples.orders.service import TOPICS
from halfway.client import transaction_id


class Fault(Enum):
    """The fault of the network between the order service and halfway for one order."""

    NONE = "nothing goes wrong"
    PREPARE_ANSWERS_LOST = "every answer to its prepare is lost, and every later request"
    PREPARE_ANSWER_LOST_ONCE = "the first answer to its prepare is lost"
    END_LOST = "its end is lost"
    END_ANSWER_LOST = "the answer to its end is lost"
    KILLED = "the service is killed between its database commit and its end"


@dataclass(frozen=True, kw_only=True)
class Planned:
    """One order."""

    id: str
    """A UUIDv7 that the customer's app makes: repeats of an order are one transaction."""
    customer: str
    group: str = "orders"
    payment: str = "card"
    fault: Fault = Fault.NONE
    flaw: str | None = None
    """The topic whose message lacks the data that its consumer needs: a poison message."""

    @property
    def body(self) -> dict[str, object]:
        """The body of the customer's request."""
        details = {"coupon": "SPRING", "shipping": "1 Harbour Street", "points": 12, "cart": f"cart-of-{self.customer}"}
        if self.flaw is not None:
            del details[self.flaw]
        return {
            "id": self.id,
            "customer": self.customer,
            "group": self.group,
            "payment": self.payment,
            "details": details,
        }


Kind = Mapping[str, object]

# The numbers per hundred orders. The rest are paid by card, and nothing goes wrong.
PER_HUNDRED: tuple[tuple[int, Kind], ...] = (
    (10, {"payment": "card-declined"}),
    (4, {"payment": "transfer"}),
    (3, {"payment": "transfer-bounces"}),
    (1, {"payment": "card-late"}),
    (2, {"payment": "invoice"}),
    (2, {"payment": "invoice", "group": "preorders"}),
    (4, {"fault": Fault.PREPARE_ANSWERS_LOST}),
    (3, {"fault": Fault.PREPARE_ANSWER_LOST_ONCE}),
    (6, {"fault": Fault.END_LOST}),
    (2, {"fault": Fault.END_LOST, "payment": "card-declined"}),
    (4, {"fault": Fault.END_ANSWER_LOST}),
    *((1, {"flaw": topic}) for topic in TOPICS),
)
KILLS = 3


def order_id(run: str, number: int) -> str:
    """Return the id of an order that is placed now."""
    return transaction_id(f"order-{run}-{number:04}", datetime.now(UTC))


def plan(orders: int, seed: int) -> list[Planned]:
    """Return the orders of a run in the sequence of placing them. Each kind occurs if `orders` is large enough."""
    rng = random.Random(seed)
    kinds: list[Kind] = [kind for share, kind in PER_HUNDRED for _ in range(max(1, round(share * orders / 100)))]
    kinds = (kinds + [{}] * (orders - len(kinds)))[: max(orders - KILLS, 0)]
    rng.shuffle(kinds)
    for kill in range(1, min(KILLS, orders) + 1):
        kinds.insert(len(kinds) * kill // (KILLS + 1), {"fault": Fault.KILLED})
    run = f"{rng.getrandbits(32):08x}"
    return [
        Planned(id=order_id(run, number), customer=f"customer-{rng.randrange(100)}", **kind)  # type: ignore[arg-type]  # fields by name
        for number, kind in enumerate(kinds, 1)
    ]
