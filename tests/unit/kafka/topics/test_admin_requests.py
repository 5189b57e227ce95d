"""A Kafka property that librdkafka refuses is named as the variable that set it."""

import pytest

from halfway.kafka.clients.config import KafkaConfig
from halfway.kafka.topics.admin_requests import admin_client
from halfway.protocol.errors import ConfigurationError


@pytest.mark.parametrize(
    "properties,variables",
    [
        ({"foo.bar": "1"}, "HALFWAY_KAFKA__FOO_BAR"),
        ({"security.protocol": "x"}, "HALFWAY_KAFKA__SECURITY_PROTOCOL"),
        (
            {"sasl.mechanism": "PLAIN", "security.protocol": "sasl_plaintext"},
            "HALFWAY_KAFKA__SASL_USERNAME, HALFWAY_KAFKA__SASL_PASSWORD",
        ),
    ],
)
def test_a_property_that_cannot_be_used_is_named(properties: dict[str, str], variables: str) -> None:
    config = KafkaConfig(properties={"bootstrap.servers": "127.0.0.1:9"} | properties, max_prepare_bytes=1_000)
    with pytest.raises(ConfigurationError) as refused:
        admin_client(config)
    assert refused.value.detail.endswith(f": correct {variables}")
