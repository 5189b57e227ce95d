"""What a rehearsal that failed says to the callers."""

import pytest
from confluent_kafka import KafkaError

from halfway.kafka.lane.suspect_lane import RehearsalFailure
from halfway.protocol.errors import HalfwayError, MessageTooLargeError, NotAuthorisedError, TopicUnavailableError


@pytest.mark.parametrize(
    "code,kind,said",
    [
        (KafkaError.INVALID_RECORD, TopicUnavailableError, "compacted"),
        (KafkaError.MSG_SIZE_TOO_LARGE, MessageTooLargeError, "max.message.bytes"),
        (KafkaError.TOPIC_AUTHORIZATION_FAILED, NotAuthorisedError, "WRITE"),
        (None, TopicUnavailableError, "scripted"),
    ],
)
def test_each_cause_is_named_with_its_topic(code: int | None, kind: type[HalfwayError], said: str) -> None:
    """A topic that became compacted refuses a message without a key, and Kafka does not say why."""
    error = RehearsalFailure("orders", code, "scripted").blame().error(1)
    assert type(error) is kind
    assert said in error.detail
    assert "orders" in error.detail
