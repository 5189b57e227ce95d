"""The consumer of a service: each message takes effect exactly once in the service's own database.

It needs confluent-kafka: `pip install 'halfway-client[consumer]'`. docs/python.md is the tutorial.
"""

try:
    import confluent_kafka as _needed  # noqa: F401 - so that the error below names the remedy
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "halfway.client.consumer needs confluent-kafka: pip install 'halfway-client[consumer]'", name=error.name
    ) from None

from halfway.client.consumer.consumer import AsyncConsumer, Consumer
from halfway.client.consumer.inbox import AsyncInbox, Inbox, RetentionTooShortError, UnknownTopicError
from halfway.client.consumer.record import Record, RejectedMessageError, Retries
from halfway.client.errors import InvalidSettingError

__all__ = [
    "AsyncConsumer",
    "AsyncInbox",
    "Consumer",
    "Inbox",
    "InvalidSettingError",
    "Record",
    "RejectedMessageError",
    "RetentionTooShortError",
    "Retries",
    "UnknownTopicError",
]
