"""The client of a producer service: prepare, run the local transaction, end, answer checks.

`Halfway` is asynchronous and `SyncHalfway` runs it for threads. docs/producing.md is the tutorial.
"""

from halfway.client.checks import Check, CheckWorker, InvalidCheckError, answer_check, read_check
from halfway.client.client import Halfway, Outcome
from halfway.client.errors import (
    AlreadyEndedError,
    ClientClosedError,
    EndUnconfirmedError,
    ForbiddenError,
    HalfwayError,
    IdReusedError,
    InvalidRequestError,
    NestedTransactionError,
    OutcomeExpiredError,
    PrepareUnconfirmedError,
    QueueFullError,
    RefusedError,
    TransactionEndedError,
    UnavailableError,
    UnknownGroupError,
    UnknownTransactionError,
    WrongEventLoopError,
)
from halfway.client.messages import Message, UnserialisableMessageError
from halfway.client.sync import SyncHalfway, SyncTransaction
from halfway.client.transaction import Transaction
from halfway.client.transport import InvalidUrlError

__all__ = [
    "AlreadyEndedError",
    "Check",
    "CheckWorker",
    "ClientClosedError",
    "EndUnconfirmedError",
    "ForbiddenError",
    "Halfway",
    "HalfwayError",
    "IdReusedError",
    "InvalidCheckError",
    "InvalidRequestError",
    "InvalidUrlError",
    "Message",
    "NestedTransactionError",
    "Outcome",
    "OutcomeExpiredError",
    "PrepareUnconfirmedError",
    "QueueFullError",
    "RefusedError",
    "SyncHalfway",
    "SyncTransaction",
    "Transaction",
    "TransactionEndedError",
    "UnavailableError",
    "UnknownGroupError",
    "UnknownTransactionError",
    "UnserialisableMessageError",
    "WrongEventLoopError",
    "answer_check",
    "read_check",
]
