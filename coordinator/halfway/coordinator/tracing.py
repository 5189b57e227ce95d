"""OpenTelemetry traces (docs/operating.md#traces). Only this module imports OpenTelemetry, and only if it is on.

The context of a transaction is stored in the headers `traceparent` and `tracestate` of its messages, so it is in the
log: it survives restarts, other instances and other releases, and consumers get it. Headers that the caller has set
stay as they are, and are the context then. Spans have no keys, no values and no remarks.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from importlib.metadata import entry_points
from typing import Any, Final, TypeVar
from urllib.parse import urlsplit

import structlog
from msgspec import structs

from halfway.coordinator.changes import Change
from halfway.coordinator.ports import CheckReply, CheckRequest, LaneAnswers
from halfway.coordinator.requests import End, EndResult, Prepare, Prepared, TraceContext
from halfway.protocol.records import Half, Message
from halfway.protocol.transactions import Action

log = structlog.get_logger(__name__)

_FLUSH_S: Final = 2.0
_PARENT: Final = "traceparent"
_STATE: Final = "tracestate"
_PARENTS: Final = "Halfway-Traceparents"
_MAX_STATE_BYTES: Final = 512
Request = TypeVar("Request", Prepare, End)


class _Tracer:
    """OpenTelemetry's functions, which are imported only here."""

    def __init__(self, provider: Any) -> None:
        self.follow: Callable[[Any], None] = lambda _: None
        from opentelemetry import trace
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self.trace = trace
        self.kinds = trace.SpanKind
        self._propagator = TraceContextTextMapPropagator()
        self._tracer = provider.get_tracer("halfway")
        logging.getLogger("opentelemetry.trace.span").setLevel(logging.ERROR)  # it logs what is wrong in a tracestate

    def context(self, headers: Mapping[str, str]) -> Any:
        """Return the context in headers; an empty one if they hold none, or an invalid one."""
        return self._propagator.extract(headers, context=self.trace.set_span_in_context(self.trace.INVALID_SPAN))

    def headers(self, span: Any) -> dict[str, str]:
        headers: dict[str, str] = {}
        self._propagator.inject(headers, context=self.trace.set_span_in_context(span))
        return headers

    def start_span(
        self, name: str, kind: Any, parent: Any, links: Iterable[Any], attributes: dict[str, Any], seconds: float
    ) -> Any:
        """Start a span that began `seconds` ago, with links to the spans of these contexts."""
        found = [self.trace.get_current_span(context).get_span_context() for context in links]
        return self._tracer.start_span(
            name,
            context=parent,
            kind=kind,
            links=[self.trace.Link(one) for one in found if one.is_valid],
            attributes=attributes,
            start_time=time.time_ns() - round(max(0.0, seconds) * 1e9),
        )

    def finish(self, span: Any, error: BaseException | str | None, attributes: Mapping[str, Any]) -> None:
        span.set_attributes(attributes)
        if error is not None:
            code = error if isinstance(error, str) else getattr(error, "code", type(error).__name__)
            span.set_attribute("error.type", code)
            span.set_status(self.trace.StatusCode.ERROR)
        span.end()
        self.follow(span)


_tracer: _Tracer | None = None
_provider: Any = None


def use(provider: Any) -> None:
    """Trace with a provider of OpenTelemetry, or no more if it is None."""
    global _tracer  # noqa: PLW0603 - one process has one
    _tracer = None if provider is None else _Tracer(provider)


def follow(ended: Callable[[Any], None]) -> None:
    """Call a function with each span that has ended, if traces are on."""
    if _tracer is not None:
        _tracer.follow = ended


def is_on() -> bool:
    return _tracer is not None


def turn_on() -> None:
    """Turn traces on if OpenTelemetry's own variables (OTEL_…) name an exporter or an endpoint."""
    global _provider  # noqa: PLW0603 - one process has one
    names = _wanted(os.environ)
    if not names:
        return
    try:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        known = {one.name: one for one in entry_points(group="opentelemetry_traces_exporter")}
        processors = [BatchSpanProcessor(known[name].load()()) for name in names]
        named = "service.name=" in os.environ.get("OTEL_RESOURCE_ATTRIBUTES", "") or "OTEL_SERVICE_NAME" in os.environ
        resource = Resource.create({} if named else {"service.name": "halfway"})
        provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        for processor in processors:
            provider.add_span_processor(processor)
        use(provider)
    except Exception as error:  # noqa: BLE001 - the variables reach the SDK and its exporters, and halfway runs without them
        is_missing = isinstance(error, ImportError | KeyError)
        remedy = "pip install 'halfway[traces]'" if is_missing else "correct the variables OTEL_…"
        log.warning("traces_off", reason=str(error), remedy=f"{remedy}, or OTEL_TRACES_EXPORTER=none")
        return
    _provider = provider
    log.info("traces_on", exporters=names)


def _wanted(environment: Mapping[str, str]) -> list[str]:
    """Return the names of the exporters, as packages declare them. The endpoint alone means OTLP."""
    endpoints = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
    default = "otlp" if any(environment.get(name) for name in endpoints) else "none"
    if environment.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return []
    protocol = environment.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or environment.get("OTEL_EXPORTER_OTLP_PROTOCOL")
    otlp = "otlp_proto_grpc" if protocol == "grpc" else "otlp_proto_http"
    names = [name.strip() for name in (environment.get("OTEL_TRACES_EXPORTER") or default).split(",")]
    return [otlp if name == "otlp" else name for name in names if name not in {"", "none"}]


def stop() -> None:
    """Export what is left, for two seconds at most."""
    if _provider is not None:
        use(None)
        last = threading.Thread(target=_provider.shutdown, name="halfway-traces", daemon=True)
        last.start()
        last.join(_FLUSH_S)


def traced(request: Request, headers: Mapping[str, str]) -> Request:
    """Return a request with the context of its HTTP request."""
    if _tracer is None or (parent := headers.get(_PARENT)) is None:
        return request
    state = headers.get(_STATE, "")
    trace = TraceContext(traceparent=parent, tracestate=state if len(state) <= _MAX_STATE_BYTES else "")
    return structs.replace(request, trace=trace)


def traced_items(kinds: Sequence[Sequence[Any]], headers: Mapping[str, str]) -> list[list[Any]]:
    """Return the prepares and ends of a batch with their contexts.

    A header names the span of each item in turn. An item without one shares the context of the HTTP request.
    """
    own = iter(headers.get(_PARENTS, "").split(","))
    shared = TraceContext(traceparent=headers.get(_PARENT, ""), shared=True)

    def with_context(item: Any) -> Any:
        parent = next(own, "").strip()
        context = TraceContext(traceparent=parent) if parent else shared
        return structs.replace(item, trace=context) if isinstance(item, Prepare | End) else item

    return [[with_context(item) for item in items] for items in kinds]


def _carrier(trace: TraceContext) -> dict[str, str]:
    return {_PARENT: trace.traceparent, **({_STATE: trace.tracestate} if trace.tracestate else {})}


def _stored(messages: Sequence[Message]) -> dict[str, str]:
    """Return the context in the headers of the first message, without a state that is too long to be passed on."""
    found: dict[str, str] = {}
    for header, value in messages[0].headers if messages else ():
        name, text = header.lower(), (value or b"").decode("latin-1")
        if name == _PARENT or (name == _STATE and len(text) <= _MAX_STATE_BYTES):
            found[name] = text
    return found


def _has_context(message: Message) -> bool:
    return any(name.lower() == _PARENT for name, _ in message.headers)


def _described(operation: str, kind: str, messages: Sequence[Message]) -> tuple[str, dict[str, Any]]:
    """Return the name of a span and its attributes, by the semantic conventions for messaging."""
    attributes: dict[str, Any] = {
        "messaging.system": "kafka",
        "messaging.operation.name": operation,
        "messaging.operation.type": kind,
    }
    topics = {message.topic for message in messages}
    if len(messages) > 1:
        attributes["messaging.batch.message_count"] = len(messages)
    if len(topics) != 1:
        return operation, attributes
    topic = topics.pop()
    return f"{operation} {topic}", attributes | {"messaging.destination.name": topic}


def begin_prepare(one: Any) -> Prepare:
    """Start the span of a `Preparation`; return its request with the context in the messages that have none.

    Its parent is the span of the caller. A context that many transactions share, or that the caller has set on a
    message, is linked; without another parent the latter is the parent.
    """
    known: Prepare = one.traced or one.request
    if _tracer is None or one.traced is not None:
        return known
    request, trace, messages = one.request, one.request.trace, one.request.messages
    caller = _tracer.context({} if trace is None else _carrier(trace))
    own = _tracer.context(_stored(messages))
    is_parent = trace is not None and not trace.shared
    name, attributes = _described("prepare", "create", messages)
    attributes["halfway.group"] = request.group
    one.span = _tracer.start_span(
        name,
        _tracer.kinds.PRODUCER,
        caller if is_parent else own,
        [own] if is_parent else [caller],
        attributes,
        asyncio.get_running_loop().time() - one.began,
    )
    added = tuple((header, value.encode()) for header, value in _tracer.headers(one.span).items())
    with_context = [
        message if _has_context(message) else structs.replace(message, headers=(*message.headers, *added))
        for message in messages
    ]
    one.traced = known = structs.replace(request, messages=tuple(with_context))
    return known


def end_prepare(span: Any, result: Prepared | Exception) -> None:
    if _tracer is not None:
        if isinstance(result, Prepared):
            known = "prepared" if result.created else "repeated"
            _tracer.finish(span, None, {"halfway.transaction.id": result.id, "halfway.result": known})
        else:
            _tracer.finish(span, result, {})


async def checked(request: CheckRequest, call: Callable[[CheckRequest], Awaitable[CheckReply]]) -> CheckReply:
    """Make a check in a span, whose context it passes on; the parent is what its transaction has stored."""
    if _tracer is None:
        return await call(request)
    attributes = {
        "http.request.method": "POST",
        "halfway.group": request.group,
        "halfway.transaction.id": request.id,
        "halfway.check.attempt": request.attempt,
    }
    parent = _tracer.context(_stored(request.messages))
    span = _tracer.start_span(f"check {request.group}", _tracer.kinds.CLIENT, parent, (), attributes, 0.0)
    found: dict[str, Any] = {}
    try:
        reply = await call(structs.replace(request, headers=_tracer.headers(span)))
        for attempt in reply.attempts[-1:]:
            place = urlsplit(attempt.host)
            found = {"server.address": place.hostname, "http.response.status_code": attempt.status}
        if reply.answered:
            found["halfway.outcome"] = reply.outcome.value
    finally:
        error = None if "halfway.outcome" in found else "no_verdict"
        _tracer.finish(span, error, {name: value for name, value in found.items() if value is not None})
    return reply


def messages_of(half: Half | None) -> tuple[Message, ...]:
    """Return the messages whose headers have the context of a transaction; none if traces are off."""
    return () if _tracer is None or half is None else half.messages


def ended(change: Change, result: object) -> None:
    """Record the span of an end, whoever has decided it. Without a caller's own span its parent is the prepare."""
    if _tracer is None or not isinstance(change.action, Action):
        return
    links: list[Any] = []
    own = _tracer.context(_stored(change.traced))
    parent, trace = own, None if change.request is None else change.request.trace
    if trace is not None:
        caller = _tracer.context(_carrier(trace))
        parent, links = (own, [caller]) if trace.shared else (caller, [own])
    name, attributes = _described(change.action.value, "settle", change.traced)
    attributes |= {
        "halfway.group": change.group if change.entry is None else change.entry.group,
        "halfway.transaction.id": change.id,
        "halfway.cause": change.cause.value,
    }
    if isinstance(result, EndResult):
        attributes["halfway.result"] = "changed" if result.changed else "unchanged"
    kind = _tracer.kinds.INTERNAL if change.request is None else _tracer.kinds.SERVER
    span = _tracer.start_span(name, kind, parent, links, attributes, asyncio.get_running_loop().time() - change.began)
    _tracer.finish(span, result if isinstance(result, Exception) else None, {})


def sent(answers: LaneAnswers, seconds: float) -> None:
    """Record the span of a Kafka transaction of the lane, with links to the transactions whose messages it wrote.

    If all of them belong to one trace, it is a part of it.
    """
    if _tracer is None:
        return
    commits = [write.messages for write, _ in answers if write.messages]
    if not commits:
        return
    contexts = [_tracer.context(_stored(messages)) for messages in commits]
    traces = {_tracer.trace.get_current_span(one).get_span_context().trace_id for one in contexts}
    name, attributes = _described("send", "send", [message for messages in commits for message in messages])
    attributes["halfway.transactions"] = len(answers)
    parent = contexts[0] if len(traces) == 1 else _tracer.context({})
    _tracer.finish(_tracer.start_span(name, _tracer.kinds.CLIENT, parent, contexts, attributes, seconds), None, {})
