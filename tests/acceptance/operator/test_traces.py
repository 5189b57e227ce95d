"""Traces of real coordinators on a real Kafka, exported over OTLP."""

from pathlib import Path
from typing import Any

from opentelemetry.sdk.trace import TracerProvider
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from halfway.client import Halfway, Message
from tests.support.brokers.fixtures import Kafka
from tests.support.brokers.members import remove_members
from tests.support.coordinator.endpoints import CheckEndpoint
from tests.support.coordinator.fleet import Fleet
from tests.support.coordinator.process import NewCoordinator
from tests.support.coordinator.rest_client import QUIET, Connect, message
from tests.support.coordinator.topics import Cluster
from tests.support.traces import Collector, picture

OURS = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


async def test_a_prepare_whose_instance_is_killed_is_one_trace_up_to_the_message(
    kafka: Kafka, connect: Connect, cluster: Cluster, endpoint: CheckEndpoint, topic: str, group: str, tmp_path: Path
) -> None:
    """The caller's span, the prepare at one instance, the check, the commit and the Kafka transaction at another.

    A traceparent that the caller has set on a message is there as it was.
    """
    tracer = TracerProvider(shutdown_on_exit=False).get_tracer("shop")
    async with Collector(tmp_path) as collector:
        fleet = Fleet(kafka.bootstrap_servers, tmp_path / "fleet", collector.settings)
        try:
            first, second = (fleet.add({"OTEL_RESOURCE_ATTRIBUTES": f"service.instance.id={one}"}) for one in "12")
            registered: dict[str, Any] = {"topics": [topic], "urls": [endpoint.url]}
            await connect(first.start()).put_group(group, **registered, policy=QUIET)
            async with Halfway(first.url, group) as client:
                with tracer.start_as_current_span("take an order") as order:
                    name = client.new_id()
                    with_its_own = Message(topic=topic, value=b"second", headers={"traceparent": OURS.encode()})
                    await client.prepare([Message(topic=topic, value=b"first"), with_its_own], id=name)
            prepared = (await collector.until(f"prepare {topic}"))[f"prepare {topic}"]
            first.kill()
            remove_members(kafka.bootstrap_servers, first.topic("members"))
            endpoint.answer("commit")
            rest = connect(second.start())
            await rest.put_group(group, **registered, policy={"first_check_after_s": 1})
            await rest.until(name, "committed")
            found = await collector.until(f"check {group}", f"commit {topic}", f"send {topic}")
            spans = [span for span in collector.spans if span.trace == prepared.trace]
            accept = {"Accept": "application/openmetrics-text; version=1.0.0"}
            async with rest.session.get(f"{rest.health_url}/metrics", headers=accept) as response:
                families = list(text_string_to_metric_families(await response.text()))  # type: ignore[no-untyped-call]
        finally:
            fleet.close()
    context = order.get_span_context()
    assert (prepared.trace, prepared.parent) == (f"{context.trace_id:032x}", f"{context.span_id:016x}")
    checked, committed, sent = (found[one] for one in (f"check {group}", f"commit {topic}", f"send {topic}"))
    assert {(span.trace, span.parent) for span in (checked, committed, sent)} == {(prepared.trace, prepared.id)}
    assert {span.resource["service.instance.id"] for span in (checked, committed, sent)} == {"2"}
    assert {span.resource["service.name"] for span in spans} == {"halfway"}
    assert sent.links == (prepared.id,)
    samples = [sample for family in families for sample in family.samples if sample.exemplar is not None]
    assert {sample.exemplar.labels["trace_id"] for sample in samples} == {prepared.trace}
    assert {sample.name for sample in samples} == {f"halfway_{one}_seconds_bucket" for one in ("check", "lane_commit")}
    assert endpoint.asked_about(name)[-1].headers["traceparent"].startswith(f"00-{checked.trace}-{checked.id}-")
    written = {record.value: record.header("traceparent") or b"" for record in await cluster.read(topic)}
    assert written[b"second"] == OURS.encode()
    assert written[b"first"].startswith(f"00-{prepared.trace}-{prepared.id}-".encode())
    print(picture(spans, prepared.parent))  # noqa: T201 - `-rP` shows it


async def test_traces_are_off_unless_an_exporter_is_named(
    new_coordinator: NewCoordinator, connect: Connect, cluster: Cluster, topic: str, group: str
) -> None:
    """No header is added, and OpenTelemetry is not imported."""
    coordinator = new_coordinator({"OTEL_SERVICE_NAME": "halfway"}).start()
    rest = connect(coordinator)
    (await rest.put_group(group, topics=[topic], policy=QUIET)).expect(201)
    await rest.commit(await rest.prepared(group, [message(topic)]))
    (record,) = await cluster.read(topic)
    assert record.header("traceparent") is None
    assert "traces_on" not in coordinator.log
