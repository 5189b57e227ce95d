"""Read-only calls for monitoring: histories, and statistics once or as events (docs/rest.md#statistics)."""

from __future__ import annotations

from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final

import msgspec

from halfway.domain.message_json import rfc3339
from halfway.rest.requests import history_models
from halfway.rest.requests import statistics_models as models
from halfway.rest.requests.data import rfc3339_or_none
from halfway.rest.requests.models import TransactionId
from halfway.rest.requests.validation import parameters, path_parameter
from halfway.rest.responses.answer import Answer, answer
from halfway.service.records.statistics_records import FailingTopic, Quarantined, RefusedWrite, Skipped

if TYPE_CHECKING:
    from halfway.rest.handlers.calls import Call
    from halfway.service.records.statistics_records import GroupFigures, InstanceFigures, Lane, ShardPlace, Statistics

_DIGITS = 3
AWAY: Final = "an instance does not answer"
"""The detail that a group sees. It does not learn the addresses of instances."""


async def get_history(call: Call) -> Answer:
    """Show what happened to a transaction."""
    transaction_id = path_parameter("id", call.parameter, TransactionId)
    history = await call.site.coordinator.history(transaction_id, deadline=call.deadline, principal=call.principal)
    events = [
        history_models.HistoryEvent(**{**msgspec.structs.asdict(event), "at": rfc3339(event.at)})
        for event in history.events
    ]
    messages = [history_models.MessagePlace(**msgspec.structs.asdict(message)) for message in history.messages]
    response = history_models.HistoryResponse(
        id=history.id,
        group=history.group,
        state=history.state,
        prepared_at=rfc3339(history.prepared_at),
        complete=not history.missing,
        missing=list(history.missing),
        events=events,
        messages=messages,
        messages_detail=history.messages_detail,
    )
    return answer(HTTPStatus.OK, response)


async def get_statistics(call: Call) -> Answer:
    """Show the statistics of all instances."""
    group = parameters(models.StatisticsParameters, *call.query).group or call.principal.group
    statistics = await call.site.coordinator.statistics.gather(group=group, principal=call.principal)
    return answer(HTTPStatus.OK, to_response(statistics, of_one_group=group is not None))


async def get_events(call: Call) -> Answer:  # noqa: ARG001 - every handler takes the call
    """Accept a listener. The server sends the events."""
    return answer(HTTPStatus.OK)


def to_response(statistics: Statistics, *, of_one_group: bool) -> models.StatisticsResponse:
    """Convert statistics; with `of_one_group`, without the addresses and the figures of instances."""
    instances = statistics.instances
    return models.StatisticsResponse(
        at=rfc3339(statistics.at),
        complete=not statistics.away,
        away=[
            models.Away(shard=place.shard, instance=None, detail=AWAY)
            if of_one_group
            else models.Away(shard=place.shard, instance=place.instance, detail=place.detail)
            for place in statistics.away
        ],
        totals=_totals(statistics),
        ends=[
            models.Ends(outcome=count.names[0], cause=count.names[1], per_s=_rounded(count.per_s), total=count.total)
            for count in statistics.ends
        ],
        checks=[
            models.Checks(verdict=count.names[0], per_s=_rounded(count.per_s), total=count.total)
            for count in statistics.checks
        ],
        groups=[_group(figures) for figures in statistics.groups],
        groups_left_out=statistics.groups_left_out,
        instances=[] if of_one_group else [_instance(instance, statistics.asked) for instance in instances],
        shards=[_shard(place) for place in statistics.shards],
        failures=models.Failures(
            topics=[_topic(topic) for instance in instances for topic in instance.topics],
            refused=[_refused(write) for instance in instances for write in instance.writes],
            quarantined=[_quarantined(entry, instance.url) for instance in instances for entry in instance.quarantined],
            skipped=[_skipped(records) for instance in instances for records in instance.skipped],
        ),
    )


def _totals(statistics: Statistics) -> models.Totals:
    shards = [shard for instance in statistics.instances for shard in instance.shards]
    return models.Totals(
        pending=sum(shard.pending for shard in shards),
        parked=sum(shard.parked for shard in shards),
        remembered=sum(shard.remembered for shard in shards),
        oldest_pending_s=max((shard.oldest_pending_s for shard in shards), default=0.0),
        resolving=sum(instance.resolving for instance in statistics.instances),
        prepares_per_s=_rounded(sum(instance.prepares_per_s for instance in statistics.instances)),
        ends_per_s=_rounded(sum(count.per_s for count in statistics.ends)),
    )


def _group(figures: GroupFigures) -> models.GroupState:
    return models.GroupState(
        group=figures.group,
        pending=figures.pending,
        parked=figures.parked,
        prepares_per_s=_rounded(figures.prepares_per_s),
        ends_per_s=_rounded(figures.ends_per_s),
        checks_in_flight=figures.checks_in_flight,
        checks_due=figures.checks_due,
        breaker="closed" if figures.breaker_until is None else "open",
        breaker_until=rfc3339_or_none(figures.breaker_until),
        endpoints=[
            models.EndpointState(
                host=endpoint.host,
                well=endpoint.well,
                status=endpoint.status,
                detail=endpoint.detail,
                at=rfc3339(endpoint.at),
                duration_s=_rounded(endpoint.duration_s),
            )
            for endpoint in figures.endpoints
        ],
    )


def _instance(figures: InstanceFigures, answering_url: str) -> models.InstanceState:
    return models.InstanceState(
        url=figures.url,
        asked=figures.url == answering_url,
        since=rfc3339(figures.since),
        shards=[shard.shard for shard in figures.shards],
        resolving=figures.resolving,
        lane=None if figures.lane is None else _lane(figures.lane),
        warnings=[models.WarningState(check=one.check, detail=one.detail) for one in figures.warnings],
    )


def _lane(lane: Lane) -> models.LaneState:
    failure = lane.last_failure
    return models.LaneState(
        commits_per_s=lane.commits_per_s,
        ends_per_s=lane.ends_per_s,
        commit_s=lane.commit_s,
        failures=lane.failures,
        last_failure=None if failure is None else models.LaneFailure(at=rfc3339(failure.at), reason=failure.reason),
    )


def _shard(place: ShardPlace) -> models.ShardState:
    names = [field.name for field in msgspec.structs.fields(models.ShardState)][2:]
    figures: dict[str, Any] = {name: None if place.figures is None else getattr(place.figures, name) for name in names}
    return models.ShardState(shard=place.shard, instance=place.instance, **figures)


def _topic(topic: FailingTopic) -> models.FailingTopicState:
    return models.FailingTopicState(
        topic=topic.topic,
        error_code=topic.error_code,
        detail=topic.detail,
        refused=topic.refused,
        first_at=rfc3339(topic.first_at),
        last_at=rfc3339(topic.last_at),
        retry_at=rfc3339_or_none(topic.retry_at),
        first_error_code=topic.first_error_code,
        first_detail=topic.first_detail,
    )


def _refused(write: RefusedWrite) -> models.RefusedState:
    return models.RefusedState(
        id=write.id,
        topic=write.topic,
        error_code=write.error_code,
        detail=write.detail,
        last_at=rfc3339(write.last_at),
        retry_at=rfc3339(write.retry_at),
    )


def _quarantined(entry: Quarantined, instance: str) -> models.QuarantinedState:
    fields = {**msgspec.structs.asdict(entry), "since": rfc3339(entry.since), "until": rfc3339_or_none(entry.until)}
    return models.QuarantinedState(instance=instance, **fields)


def _skipped(records: Skipped) -> models.SkippedState:
    last_at = rfc3339(records.last_at)
    return models.SkippedState(topic=records.topic, reason=records.reason, count=records.count, last_at=last_at)


def _rounded(number: float) -> float:
    return round(number, _DIGITS)
