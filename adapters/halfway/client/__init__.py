"""The client of a producer service: prepare, run the local transaction, end, answer checks.

`Halfway` is the asynchronous client, `SyncHalfway` the client for threads. docs/producing.md is the tutorial.
"""

from halfway.client.calls.transport import InvalidKeyError, InvalidUrlError, Key
from halfway.client.checks.answers import (
    Check,
    Decide,
    DecideSync,
    InvalidCheckError,
    answer_check,
    answer_check_sync,
    read_check,
)
from halfway.client.checks.endpoints import AiohttpChecks, AsgiChecks, FlaskChecks, WsgiChecks, join_aiohttp
from halfway.client.checks.verification import CheckVerifier, InvalidSecretError, InvalidSignatureError
from halfway.client.errors import (
    AlreadyEndedError,
    ClientClosedError,
    EndUnconfirmedError,
    ForbiddenError,
    HalfwayError,
    IdReusedError,
    InvalidRequestError,
    MissingRowError,
    NestedTransactionError,
    NotHalfwayError,
    OutcomeExpiredError,
    PreparesRejectedError,
    PrepareUnconfirmedError,
    QueueFullError,
    RefusedError,
    TransactionEndedError,
    UnauthenticatedError,
    UnavailableError,
    UnknownGroupError,
    UnknownTransactionError,
    WrongEventLoopError,
)
from halfway.client.messages import Data, Message, Outcome, UnserialisableMessageError, Value
from halfway.client.producer.client import CheckWorker, Halfway
from halfway.client.producer.listener import (
    SyncTransactionListener,
    SyncTransactionProducer,
    TransactionListener,
    TransactionProducer,
)
from halfway.client.producer.sync import SyncHalfway, SyncTransaction
from halfway.client.producer.transaction import MixedProducersError, NoBarrierError, Transaction

__all__ = [
    "AiohttpChecks",
    "AlreadyEndedError",
    "AsgiChecks",
    "Check",
    "CheckVerifier",
    "CheckWorker",
    "ClientClosedError",
    "Data",
    "Decide",
    "DecideSync",
    "EndUnconfirmedError",
    "FlaskChecks",
    "ForbiddenError",
    "Halfway",
    "HalfwayError",
    "IdReusedError",
    "InvalidCheckError",
    "InvalidKeyError",
    "InvalidRequestError",
    "InvalidSecretError",
    "InvalidSignatureError",
    "InvalidUrlError",
    "Key",
    "Message",
    "MissingRowError",
    "MixedProducersError",
    "NestedTransactionError",
    "NoBarrierError",
    "NotHalfwayError",
    "Outcome",
    "OutcomeExpiredError",
    "PrepareUnconfirmedError",
    "PreparesRejectedError",
    "QueueFullError",
    "RefusedError",
    "SyncHalfway",
    "SyncTransaction",
    "SyncTransactionListener",
    "SyncTransactionProducer",
    "Transaction",
    "TransactionEndedError",
    "TransactionListener",
    "TransactionProducer",
    "UnauthenticatedError",
    "UnavailableError",
    "UnknownGroupError",
    "UnknownTransactionError",
    "UnserialisableMessageError",
    "Value",
    "WrongEventLoopError",
    "WsgiChecks",
    "answer_check",
    "answer_check_sync",
    "join_aiohttp",
    "read_check",
]
