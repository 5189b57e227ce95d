"""Traces with the exporter in memory: what is one trace, what is linked, and what is left alone."""

from collections.abc import Iterator
from functools import partial

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode
from structlog.testing import capture_logs

from halfway.coordinator import tracing
from halfway.coordinator.ports import LaneWrite, Written
from halfway.coordinator.requests import End, Prepare, TraceContext
from halfway.protocol.errors import HalfwayError, IdReusedError
from halfway.protocol.records import Message
from halfway.protocol.transactions import Outcome, State
from tests.support.ids import named_id_in
from tests.support.service.world import SHARDS, World
from tests.support.surroundings import verdict
from tests.unit.coordinator.cluster.test_forward import instance

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
CALLER = f"00-{TRACE}-00f067aa0ba902b7-01"
OTHER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
SECRET = b"4929-1234"


@pytest.fixture
def spans() -> Iterator[InMemorySpanExporter]:
    """Trace with an exporter in memory."""
    exporter, provider = InMemorySpanExporter(), TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracing.use(provider)
    yield exporter
    tracing.use(None)


def request(*messages: Message, trace: str | None = CALLER, shared: bool = False, name: str | None = None) -> Prepare:
    context = None if trace is None else TraceContext(traceparent=trace, tracestate="vendor=1", shared=shared)
    return Prepare(
        group="shop", messages=messages or (Message(topic="orders", key=SECRET, value=SECRET),), id=name, trace=context
    )


def by_name(exporter: InMemorySpanExporter) -> dict[str, ReadableSpan]:
    return {span.name: span for span in exporter.get_finished_spans()}


def own(span: ReadableSpan) -> str:
    return f"00-{span.context.trace_id:032x}-{span.context.span_id:016x}-01"


def parent(span: ReadableSpan) -> str | None:
    return None if span.parent is None else f"00-{span.parent.trace_id:032x}-{span.parent.span_id:016x}-01"


def links(span: ReadableSpan) -> list[str]:
    return [f"00-{link.context.trace_id:032x}-{link.context.span_id:016x}-01" for link in span.links]


def headers(world: World, topic: str = "orders") -> list[dict[str, bytes | None]]:
    return [dict(record.headers) for record in world.memory.records(topic)]


async def test_a_prepare_is_a_child_of_its_caller_and_its_context_is_that_of_the_message(
    world: World, spans: InMemorySpanExporter
) -> None:
    """The end of another caller is in that one's trace, with a link to the prepare. No payload is in a span."""
    done = await world.coordinator.prepare(request(), deadline=world.deadline())
    ending = End(id=done.id, outcome=Outcome.COMMIT, trace=TraceContext(traceparent=OTHER))
    await world.coordinator.end(ending, deadline=world.deadline())
    found = by_name(spans)
    prepared, ended = found["prepare orders"], found["commit orders"]
    assert (parent(prepared), prepared.kind, parent(ended), links(ended)) == (
        CALLER,
        SpanKind.PRODUCER,
        OTHER,
        [own(prepared)],
    )
    (written,) = headers(world)
    assert (written["traceparent"], written["tracestate"]) == (own(prepared).encode(), b"vendor=1")
    assert dict(prepared.attributes or {}) == {
        "messaging.system": "kafka",
        "messaging.operation.name": "prepare",
        "messaging.operation.type": "create",
        "messaging.destination.name": "orders",
        "halfway.group": "shop",
        "halfway.transaction.id": done.id,
        "halfway.result": "prepared",
    }
    assert SECRET.decode() not in "".join(span.to_json() for span in spans.get_finished_spans())


async def test_a_check_after_a_crash_goes_on_with_the_context_in_the_log(spans: InMemorySpanExporter) -> None:
    """The next instance has it from the log: check and commit are children of the prepare of the first one."""
    first = await World.start()
    await first.group()
    await first.coordinator.prepare(request(), deadline=first.deadline())
    world = await first.restart()
    world.memory.caller.always(verdict(Outcome.COMMIT))
    await world.scan(after_s=6)
    await world.stop()
    found = by_name(spans)
    prepared, checked = own(found["prepare orders"]), found["check shop"]
    assert (parent(checked), parent(found["commit orders"])) == (prepared, prepared)
    (asked,) = world.memory.caller.requests
    assert asked.headers["traceparent"] == own(checked)
    assert (checked.attributes or {})["halfway.outcome"] == "commit"
    assert {span.context.trace_id for span in found.values()} == {int(TRACE, 16)}


async def test_a_context_that_a_request_with_many_transactions_has_is_linked(
    world: World, spans: InMemorySpanExporter
) -> None:
    """Else all its transactions would be one trace."""
    for _ in range(2):
        await world.coordinator.prepare(request(shared=True), deadline=world.deadline())
    made = spans.get_finished_spans()
    assert [(parent(span), links(span)) for span in made] == [(None, [CALLER])] * 2
    assert len({span.context.trace_id for span in made}) == 2


async def test_a_traceparent_that_the_caller_has_set_is_left_byte_for_byte(
    world: World, spans: InMemorySpanExporter
) -> None:
    """Also one that is none, or in capitals. The other messages get halfway's."""
    kept = [("traceparent", OTHER.encode()), ("traceparent", b"\xff not one"), ("TraceParent", OTHER.encode())]
    messages = [Message(topic="points", value=b"v", headers=(one, ("a", b"1"))) for one in reversed(kept)]
    done = await world.coordinator.prepare(
        request(*messages, Message(topic="points", value=b"v")), deadline=world.deadline()
    )
    await world.end(done.id, Outcome.COMMIT)
    prepared = by_name(spans)["prepare points"]
    assert (parent(prepared), links(prepared)) == (CALLER, [OTHER])
    *users, last = headers(world, "points")
    assert [list(one.items())[:2] for one in users] == [[one, ("a", b"1")] for one in reversed(kept)]
    assert [name for one in users for name in one].count("tracestate") == 0
    assert last["traceparent"] == own(prepared).encode()
    spans.clear()
    await world.coordinator.prepare(request(messages[0], trace=None), deadline=world.deadline())
    assert parent(by_name(spans)["prepare points"]) == OTHER


@pytest.mark.parametrize("state", [b"x=" + b"y" * 511, b"not a state"], ids=["too long", "malformed"])
async def test_a_state_that_is_too_long_or_malformed_is_neither_passed_on_nor_logged(
    world: World, spans: InMemorySpanExporter, caplog: pytest.LogCaptureFixture, state: bytes
) -> None:
    """So the context is bounded, whatever a request or a message has."""
    of_message = Message(topic="points", headers=(("traceparent", OTHER.encode()), ("tracestate", state)))
    of_request = tracing.traced(request(trace=None), {"traceparent": CALLER, "tracestate": state.decode()})
    for asked in (request(of_message, Message(topic="orders"), trace=None), of_request):
        done = await world.coordinator.prepare(asked, deadline=world.deadline())
        await world.end(done.id, Outcome.COMMIT)
    assert ["tracestate" in one for one in (*headers(world, "points"), *headers(world))] == [True, False, False]
    assert all("traceparent" in one for one in headers(world))
    assert caplog.text == ""


async def test_an_owner_gets_the_context_from_the_instance_that_forwards(spans: InMemorySpanExporter) -> None:
    here = await instance({0})
    there = await instance({1}, here.memory)
    await here.group()
    name = named_id_in(1, "forwarded", shards=SHARDS)
    await here.coordinator.prepare(request(name=name), deadline=here.deadline())
    trace = TraceContext(traceparent=OTHER)
    await here.coordinator.end(End(id=name, outcome=Outcome.ROLLBACK, trace=trace), deadline=here.deadline())
    await here.stop()
    await there.stop()
    found = by_name(spans)
    assert (parent(found["prepare orders"]), parent(found["rollback orders"])) == (CALLER, OTHER)


async def test_the_same_prepare_in_another_span_is_the_same(world: World, spans: InMemorySpanExporter) -> None:
    """The context is not content: a repeat is answered as before, and other content is refused."""
    name = named_id_in(0, "again", shards=SHARDS)
    await world.coordinator.prepare(request(name=name), deadline=world.deadline())
    assert not (await world.coordinator.prepare(request(name=name, trace=OTHER), deadline=world.deadline())).created
    with pytest.raises(IdReusedError):
        await world.coordinator.prepare(request(Message(topic="orders"), name=name), deadline=world.deadline())
    assert len(spans.get_finished_spans()) == 1


async def test_a_refused_prepare_is_a_span_with_its_error(world: World, spans: InMemorySpanExporter) -> None:
    with pytest.raises(HalfwayError):
        await world.coordinator.prepare(request(Message(topic="compacted")), deadline=world.deadline())
    (span,) = spans.get_finished_spans()
    assert (span.status.status_code, (span.attributes or {})["error.type"]) == (StatusCode.ERROR, "invalid_request")


@pytest.mark.parametrize("traces, parents", [([CALLER, CALLER], [CALLER]), ([CALLER, OTHER], [None])])
def test_a_kafka_transaction_is_linked_to_all_that_it_commits(
    spans: InMemorySpanExporter, traces: list[str], parents: list[str | None]
) -> None:
    """It belongs to a trace if all of them do."""
    write = partial(LaneWrite, shard=0, group="shop", state=State.COMMITTED, prepared_at=0, deadline=0.0)
    writes = [
        write(id="t", messages=(Message(topic="orders", headers=(("traceparent", one.encode()),)),)) for one in traces
    ]
    tracing.sent([(one, Written()) for one in [*writes, write(id="rolled back")]], 0.5)
    (span,) = spans.get_finished_spans()
    assert ([parent(span)], links(span)) == (parents, traces)
    assert (span.attributes or {})["messaging.batch.message_count"] == 2
    tracing.sent([(write(id="rolled back"), Written())], 0.5)
    assert len(spans.get_finished_spans()) == 1


async def test_nothing_is_added_unless_traces_are_on(world: World) -> None:
    done = await world.coordinator.prepare(request(), deadline=world.deadline())
    assert (await world.coordinator.get(done.id, deadline=world.deadline())).messages == request().messages
    await world.end(done.id, Outcome.COMMIT)
    assert [name for name in headers(world)[0] if not name.startswith("halfway-")] == []


@pytest.mark.parametrize(
    "environment, exporters",
    [
        ({}, []),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4318"}, ["otlp_proto_http"]),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4317", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, ["otlp_proto_grpc"]),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4318", "OTEL_TRACES_EXPORTER": "none"}, []),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4318", "OTEL_SDK_DISABLED": "true"}, []),
        ({"OTEL_TRACES_EXPORTER": "otlp, console"}, ["otlp_proto_http", "console"]),
    ],
)
def test_the_variables_of_opentelemetry_turn_traces_on(environment: dict[str, str], exporters: list[str]) -> None:
    """The default is off. The endpoint alone is enough."""
    assert tracing._wanted(environment) == exporters


@pytest.mark.parametrize(
    "variables, reason",
    [
        ({"OTEL_TRACES_EXPORTER": "zipkin"}, "'zipkin'"),
        ({"OTEL_TRACES_EXPORTER": "console", "OTEL_BSP_MAX_QUEUE_SIZE": "100"}, "max_queue_size"),
    ],
)
def test_variables_that_opentelemetry_refuses_are_named(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], reason: str
) -> None:
    """They may be meant for others, so halfway runs without traces."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with capture_logs() as logs:
        tracing.turn_on()
    assert not tracing.is_on()
    (line,) = logs
    assert line["event"] == "traces_off"
    assert reason in line["reason"]
    assert "OTEL_" in line["remedy"]
