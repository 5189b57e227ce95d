"""Compares the retention of the inbox with the retention of topics."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Final

from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import (  # type: ignore[attr-defined]  # public, but not for mypy
    AdminClient,
    ConfigResource,
    ResourceType,
)

from halfway.client.consumer.settings import connection_settings
from halfway.client.errors import HalfwayError

log = logging.getLogger(__name__)

_TIMEOUT_S: Final = 30.0


class RetentionTooShortError(HalfwayError, ValueError):
    """Rows of the inbox would be deleted while a topic still has their records: raise `retention_s`."""


class UnknownTopicError(HalfwayError, ValueError):
    """A topic does not exist: create it first."""


def check_topics(
    settings: Mapping[str, Any], topics: Sequence[str], others: Sequence[str], inbox_s: float | None
) -> None:
    """Raise if a topic does not exist, or if one of `topics` has a longer retention than the inbox (`inbox_s`).

    A record that is read again after its row was deleted takes effect again. Topics that the credential may not
    describe are logged and not compared.
    """
    admin = AdminClient(connection_settings(settings))
    resources = [ConfigResource(ResourceType.TOPIC, topic) for topic in {*topics, *others}]
    for resource, answer in admin.describe_configs(resources, request_timeout=_TIMEOUT_S).items():
        try:
            config = {name: entry.value for name, entry in answer.result().items()}
        except KafkaException as error:
            _raise_unless_forbidden(resource.name, error)
            continue
        if inbox_s is not None and resource.name in topics:
            _compare(resource.name, config, inbox_s)


def _raise_unless_forbidden(topic: str, error: KafkaException) -> None:
    code = error.args[0].code()
    if code == KafkaError.UNKNOWN_TOPIC_OR_PART:
        raise UnknownTopicError(f"the topic {topic} does not exist: create it first") from None
    if code != KafkaError.TOPIC_AUTHORIZATION_FAILED:
        raise error
    log.warning("cannot read the settings of topic %s: its retention is not checked; allow DescribeConfigs", topic)


def _compare(topic: str, config: Mapping[str, str | None], inbox_s: float) -> None:
    retention_ms = int(config.get("retention.ms") or -1)
    if "delete" not in (config.get("cleanup.policy") or "") or retention_ms < 0:
        raise RetentionTooShortError(
            f"the topic {topic} keeps records for ever, the inbox keeps rows for {inbox_s:.0f} s: give the inbox"
            " retention_s=None, or the topic a retention"
        )
    # Kafka deletes a record together with its segment, which is closed up to segment.ms after its first record.
    topic_s = (retention_ms + int(config.get("segment.ms") or 0)) / 1000
    if inbox_s < topic_s:
        raise RetentionTooShortError(
            f"the topic {topic} keeps records for up to {topic_s:.0f} s (retention.ms and segment.ms), the inbox keeps"
            f" rows for {inbox_s:.0f} s: give the inbox a retention_s of {topic_s:.0f} or more"
        )
