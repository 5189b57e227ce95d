"""The context of a trace in the headers of requests, and of the client."""

import asyncio

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from halfway.client import Halfway
from halfway.client import Message as ClientMessage
from tests.support.rest.client import RestWorld
from tests.unit.coordinator.test_tracing import CALLER, OTHER, by_name, links, own, parent, spans

__all__ = ["spans"]


async def test_each_call_of_the_client_is_in_the_trace_of_its_caller(spans: InMemorySpanExporter) -> None:
    """They share a request. One that no span makes begins a trace of its own."""
    tracer = TracerProvider(shutdown_on_exit=False).get_tracer("shop")
    callers: dict[str, str] = {}

    async def order(client: Halfway, topic: str) -> None:
        with tracer.start_as_current_span(topic) as span:
            callers[topic] = f"{span.get_span_context().span_id:016x}"
            await _order(client, topic)

    async def _order(client: Halfway, topic: str) -> None:
        name = client.new_id()
        await client.prepare([ClientMessage(topic=topic, value="v")], id=name)
        await client.end(name, "commit")

    async with RestWorld() as rest, Halfway(rest.url, "shop") as client:
        await rest.put_shop(topics=["orders", "coupons"])
        await asyncio.gather(order(client, "orders"), order(client, "coupons"))
        assert rest.requests.counts["batch", 200] < 4
        found = by_name(spans)
        spans.clear()
        await _order(client, "orders")
    for topic, caller in callers.items():
        assert [(parent(found[f"{one} {topic}"]) or "").split("-")[2] for one in ("prepare", "commit")] == [caller] * 2
    alone = by_name(spans)
    assert parent(alone["prepare orders"]) is None
    assert parent(alone["commit orders"]) == own(alone["prepare orders"])


async def test_the_headers_of_a_request_are_the_parent_of_one_transaction_and_a_link_of_many(
    spans: InMemorySpanExporter,
) -> None:
    """Each item of a batch can name its own span."""
    async with RestWorld() as rest:
        await rest.put_shop()
        body = {"group": "shop", "messages": [{"topic": "orders", "value": "v"}]}
        await rest.call("POST", "/v1/transactions", body, headers={"traceparent": CALLER})
        each = {"traceparent": CALLER, "Halfway-Traceparents": f",{OTHER}"}
        await rest.call("POST", "/v1/batch", {"prepare": [body] * 3}, headers=each)
        await rest.call("POST", "/v1/batch", {"prepare": [body]}, headers={"Halfway-Traceparents": "x" * 2000})
    found = [(parent(span), links(span)) for span in spans.get_finished_spans()]
    assert found[0] == (CALLER, [])
    assert sorted(found[1:], key=str) == sorted([(None, [CALLER])] * 2 + [(OTHER, []), (None, [])], key=str)
