"""Comparing how long the inbox remembers with how long topics hold their records."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Final

from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import (  # type: ignore[attr-defined]  # they are there
    AdminClient,
    ConfigResource,
    ResourceType,
)

from halfway.client.consumer.settings import connection_settings
from halfway.client.errors import HalfwayError

log = logging.getLogger(__name__)

_ANSWER_WITHIN_S: Final = 30.0


class RetentionTooShortError(HalfwayError, ValueError):
    """Rows of the inbox would be cleaned while a topic still holds their records: raise `retention_s`."""


class UnknownTopicError(HalfwayError, ValueError):
    """A topic does not exist: create it first."""


def check_topics(
    settings: Mapping[str, Any], topics: Sequence[str], others: Sequence[str], kept_s: float | None
) -> None:
    """Raise if a topic does not exist, or if one of `topics` holds records for longer than rows are kept.

    A record that is read again after its row was cleaned takes effect again. What the credential may not describe is
    logged and not compared.
    """
    admin = AdminClient(connection_settings(settings))
    wanted = [ConfigResource(ResourceType.TOPIC, topic) for topic in {*topics, *others}]
    for resource, answer in admin.describe_configs(wanted, request_timeout=_ANSWER_WITHIN_S).items():
        try:
            found = {name: entry.value for name, entry in answer.result().items()}
        except KafkaException as error:
            _cannot_tell(resource.name, error)
            continue
        if kept_s is not None and resource.name in topics:
            _compare(resource.name, found, kept_s)


def _cannot_tell(topic: str, error: KafkaException) -> None:
    code = error.args[0].code()
    if code == KafkaError.UNKNOWN_TOPIC_OR_PART:
        raise UnknownTopicError(f"the topic {topic} does not exist: create it first") from None
    if code != KafkaError.TOPIC_AUTHORIZATION_FAILED:
        raise error
    log.warning("the settings of topic %s cannot be read: allow DescribeConfigs; its retention is not checked", topic)


def _compare(topic: str, config: Mapping[str, str | None], kept_s: float) -> None:
    retention_ms = int(config.get("retention.ms") or -1)
    if "delete" not in (config.get("cleanup.policy") or "") or retention_ms < 0:
        raise RetentionTooShortError(
            f"the topic {topic} holds records for ever, rows of the inbox are kept for {kept_s:.0f} s: give the inbox"
            " retention_s=None, or the topic a retention"
        )
    # A record goes with its segment, which is closed up to segment.ms after it began.
    held_s = (retention_ms + int(config.get("segment.ms") or 0)) / 1000
    if kept_s < held_s:
        raise RetentionTooShortError(
            f"the topic {topic} holds records for up to {held_s:.0f} s (retention.ms and segment.ms), rows of the inbox"
            f" are kept for {kept_s:.0f} s: give the inbox a retention_s of {held_s:.0f} or more"
        )
