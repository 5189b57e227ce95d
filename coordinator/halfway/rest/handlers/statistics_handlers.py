"""Calls that watch: statistics once, or as events (docs/rest.md#statistics)."""

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
from halfway.service.figures import FailingTopic, Quarantined, RefusedWrite, Skipped

if TYPE_CHECKING:
    from halfway.rest.handlers.calls import Call
    from halfway.service.figures import GroupFigures, InstanceFigures, Lane, ShardPlace, Statistics

_DIGITS = 3
AWAY: Final = "an instance gives no answer"
"""What a group is told: where instances are is not its business."""


async def get_history(call: Call) -> Answer:
    """Show what happened to a transaction."""
    transaction_id = path_parameter("id", call.parameter, TransactionId)
    found = await call.site.coordinator.history(transaction_id, deadline=call.deadline, principal=call.principal)
    events = [
        history_models.HistoryEvent(**{**msgspec.structs.asdict(event), "at": rfc3339(event.at)})
        for event in found.events
    ]
    messages = [history_models.MessagePlace(**msgspec.structs.asdict(message)) for message in found.messages]
    told = history_models.HistoryResponse(
        id=found.id,
        group=found.group,
        state=found.state,
        prepared_at=rfc3339(found.prepared_at),
        complete=not found.missing,
        missing=list(found.missing),
        events=events,
        messages=messages,
        messages_detail=found.messages_detail,
    )
    return answer(HTTPStatus.OK, told)


async def get_statistics(call: Call) -> Answer:
    """Show what all instances know now."""
    group = parameters(models.StatisticsParameters, *call.query).group or call.principal.group
    found = await call.site.coordinator.statistics.gather(group=group, principal=call.principal)
    return answer(HTTPStatus.OK, shown(found, of_one_group=group is not None))


async def get_events(call: Call) -> Answer:  # noqa: ARG001 - as every handler
    """Accept a listener; the server sends the events."""
    return answer(HTTPStatus.OK)


def shown(found: Statistics, *, of_one_group: bool) -> models.StatisticsResponse:
    """Return statistics as they are answered: those of one group are of nothing else."""
    instances = found.instances
    return models.StatisticsResponse(
        at=rfc3339(found.at),
        complete=not found.away,
        away=[
            models.Away(shard=one.shard, instance=None, detail=AWAY)
            if of_one_group
            else models.Away(shard=one.shard, instance=one.instance, detail=one.detail)
            for one in found.away
        ],
        totals=_totals(found),
        ends=[
            models.Ends(outcome=one.names[0], cause=one.names[1], per_s=_rounded(one.per_s), total=one.total)
            for one in found.ends
        ],
        checks=[
            models.Checks(verdict=one.names[0], per_s=_rounded(one.per_s), total=one.total) for one in found.checks
        ],
        groups=[_group(one) for one in found.groups],
        groups_left_out=found.groups_left_out,
        instances=[] if of_one_group else [_instance(one, found.asked) for one in instances],
        shards=[_shard(one) for one in found.shards],
        failures=models.Failures(
            topics=[_topic(one) for instance in instances for one in instance.topics],
            refused=[_refused(one) for instance in instances for one in instance.writes],
            quarantined=[_quarantined(one, instance.url) for instance in instances for one in instance.quarantined],
            skipped=[_skipped(one) for instance in instances for one in instance.skipped],
        ),
    )


def _totals(found: Statistics) -> models.Totals:
    shards = [one for instance in found.instances for one in instance.shards]
    return models.Totals(
        pending=sum(one.pending for one in shards),
        parked=sum(one.parked for one in shards),
        remembered=sum(one.remembered for one in shards),
        oldest_pending_s=max((one.oldest_pending_s for one in shards), default=0.0),
        resolving=sum(instance.resolving for instance in found.instances),
        prepares_per_s=_rounded(sum(instance.prepares_per_s for instance in found.instances)),
        ends_per_s=_rounded(sum(one.per_s for one in found.ends)),
    )


def _group(one: GroupFigures) -> models.GroupState:
    return models.GroupState(
        group=one.group,
        pending=one.pending,
        parked=one.parked,
        prepares_per_s=_rounded(one.prepares_per_s),
        ends_per_s=_rounded(one.ends_per_s),
        checks_in_flight=one.checks_in_flight,
        checks_due=one.checks_due,
        breaker="closed" if one.breaker_until is None else "open",
        breaker_until=rfc3339_or_none(one.breaker_until),
        endpoints=[
            models.EndpointState(
                host=endpoint.host,
                well=endpoint.well,
                status=endpoint.status,
                detail=endpoint.detail,
                at=rfc3339(endpoint.at),
                duration_s=_rounded(endpoint.duration_s),
            )
            for endpoint in one.endpoints
        ],
    )


def _instance(one: InstanceFigures, asked: str) -> models.InstanceState:
    return models.InstanceState(
        url=one.url,
        asked=one.url == asked,
        since=rfc3339(one.since),
        shards=[shard.shard for shard in one.shards],
        resolving=one.resolving,
        lane=None if one.lane is None else _lane(one.lane),
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


def _shard(one: ShardPlace) -> models.ShardState:
    names = [field.name for field in msgspec.structs.fields(models.ShardState)][2:]
    figures: dict[str, Any] = {name: None if one.figures is None else getattr(one.figures, name) for name in names}
    return models.ShardState(shard=one.shard, instance=one.instance, **figures)


def _topic(one: FailingTopic) -> models.FailingTopicState:
    return models.FailingTopicState(
        topic=one.topic,
        error_code=one.error_code,
        detail=one.detail,
        refused=one.refused,
        first_at=rfc3339(one.first_at),
        last_at=rfc3339(one.last_at),
        retry_at=rfc3339_or_none(one.retry_at),
        first_error_code=one.first_error_code,
        first_detail=one.first_detail,
    )


def _refused(one: RefusedWrite) -> models.RefusedState:
    return models.RefusedState(
        id=one.id,
        topic=one.topic,
        error_code=one.error_code,
        detail=one.detail,
        last_at=rfc3339(one.last_at),
        retry_at=rfc3339(one.retry_at),
    )


def _quarantined(one: Quarantined, instance: str) -> models.QuarantinedState:
    told = {**msgspec.structs.asdict(one), "since": rfc3339(one.since), "until": rfc3339_or_none(one.until)}
    return models.QuarantinedState(instance=instance, **told)


def _skipped(one: Skipped) -> models.SkippedState:
    return models.SkippedState(topic=one.topic, reason=one.reason, count=one.count, last_at=rfc3339(one.last_at))


def _rounded(number: float) -> float:
    return round(number, _DIGITS)
