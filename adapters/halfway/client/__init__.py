"""The client of a producer service: prepare, run the local transaction, end, answer checks.

`Halfway` is asynchronous and `SyncHalfway` runs it for threads. docs/producing.md is the tutorial.
"""

from halfway.client.checks import Check, InvalidCheckError, answer_check, answer_check_sync, read_check
from halfway.client.client import Halfway
from halfway.client.endpoints import AiohttpChecks, AsgiChecks, FlaskChecks, WsgiChecks
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
from halfway.client.listener import TransactionListener, TransactionProducer
from halfway.client.messages import Message, UnserialisableMessageError
from halfway.client.outcome import Outcome
from halfway.client.sending import MixedProducersError, NoBarrierError
from halfway.client.sync import SyncHalfway, SyncTransaction
from halfway.client.transaction import Transaction
from halfway.client.transport import InvalidUrlError
from halfway.client.worker import CheckWorker

__all__ = [
    "AiohttpChecks",
    "AlreadyEndedError",
    "AsgiChecks",
    "Check",
    "CheckWorker",
    "ClientClosedError",
    "EndUnconfirmedError",
    "FlaskChecks",
    "ForbiddenError",
    "Halfway",
    "HalfwayError",
    "IdReusedError",
    "InvalidCheckError",
    "InvalidRequestError",
    "InvalidUrlError",
    "Message",
    "MixedProducersError",
    "NestedTransactionError",
    "NoBarrierError",
    "Outcome",
    "OutcomeExpiredError",
    "PrepareUnconfirmedError",
    "QueueFullError",
    "RefusedError",
    "SyncHalfway",
    "SyncTransaction",
    "Transaction",
    "TransactionEndedError",
    "TransactionListener",
    "TransactionProducer",
    "UnavailableError",
    "UnknownGroupError",
    "UnknownTransactionError",
    "UnserialisableMessageError",
    "WrongEventLoopError",
    "WsgiChecks",
    "answer_check",
    "answer_check_sync",
    "read_check",
]
