"""A collector of traces: OpenTelemetry's own if HALFWAY_TEST_COLLECTOR names it (`make deploy-test`), else a receiver.

Either gets what a coordinator exports over OTLP. `picture` draws a trace as text.
"""

import asyncio
import base64
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from aiohttp import web
from google.protobuf.json_format import MessageToDict
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from halfway.embedded.broker import HOST, pick_port
from halfway.embedded.process import SupervisedProcess
from tests.support.waiting import until_true

QUICK: Mapping[str, str] = {"OTEL_TRACES_EXPORTER": "otlp", "OTEL_BSP_SCHEDULE_DELAY": "50"}
"""Export at once, so that a killed process loses no span."""


@dataclass(frozen=True, kw_only=True)
class Span:
    """A span as a collector gets it; ids are hexadecimal, times in ns."""

    name: str
    trace: str
    id: str
    parent: str
    links: tuple[str, ...]
    start: int
    end: int
    kind: str
    attributes: Mapping[str, Any]
    resource: Mapping[str, Any] = field(repr=False)


class Collector:
    """Receives spans over OTLP until the end of its block."""

    def __init__(self, folder: Path) -> None:
        self._binary = os.environ.get("HALFWAY_TEST_COLLECTOR")
        self._port = pick_port()
        self._folder = folder
        self._file = folder / "spans.json"
        self._received: list[dict[str, Any]] = []
        self._runner: web.AppRunner | None = None
        self._process: SupervisedProcess | None = None

    @property
    def settings(self) -> dict[str, str]:
        return {**QUICK, "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://{HOST}:{self._port}"}

    async def __aenter__(self) -> Self:
        if self._binary is None:
            app = web.Application()
            app.router.add_post("/v1/traces", self._receive)
            self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
            await self._runner.setup()
            await web.TCPSite(self._runner, HOST, self._port).start()
            return self
        configuration = self._folder / "collector.yaml"
        configuration.write_text(
            json.dumps(
                {
                    "receivers": {"otlp": {"protocols": {"http": {"endpoint": f"{HOST}:{self._port}"}}}},
                    "exporters": {"file": {"path": str(self._file), "flush_interval": "50ms"}},
                    "service": {
                        "pipelines": {"traces": {"receivers": ["otlp"], "exporters": ["file"]}},
                        "telemetry": {"metrics": {"level": "none"}},
                    },
                }
            )
        )
        command = [self._binary, str(configuration)]
        log = self._folder / "collector.log"
        self._process = SupervisedProcess(command, cwd=self._folder, log_path=log)
        await until_true(lambda: "Everything is ready" in log.read_text())
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
        if self._process is not None:
            self._process.terminate()
            await asyncio.to_thread(self._process.wait, 30)

    async def _receive(self, request: web.Request) -> web.Response:
        exported = MessageToDict(ExportTraceServiceRequest.FromString(await request.read()))
        for resource in exported.get("resourceSpans", ()):
            for span in [span for scope in resource["scopeSpans"] for span in scope["spans"]]:
                for one in (span, *span.get("links", ())):
                    one |= {
                        name: base64.b64decode(one[name]).hex()
                        for name in ("traceId", "spanId", "parentSpanId")
                        if name in one
                    }
        self._received.append(exported)
        return web.Response(body=b"", content_type="application/x-protobuf")

    @property
    def spans(self) -> list[Span]:
        """Everything that has come so far, by the time of its start."""
        whole = self._received
        if self._binary is not None:
            lines = self._file.read_text().splitlines(keepends=True) if self._file.exists() else []
            whole = [json.loads(line) for line in lines if line.endswith("\n")]
        found = [
            _span(span, _attributes(resource.get("resource", {})))
            for exported in whole
            for resource in exported.get("resourceSpans", ())
            for scope in resource["scopeSpans"]
            for span in scope["spans"]
        ]
        return sorted(found, key=lambda span: span.start)

    async def until(self, *names: str) -> dict[str, Span]:
        """Wait until spans with these names have come, and return the last of each."""
        await until_true(lambda: {span.name for span in self.spans} >= set(names))
        return {span.name: span for span in self.spans}


def _span(span: dict[str, Any], resource: Mapping[str, Any]) -> Span:
    return Span(
        name=span["name"],
        trace=span["traceId"],
        id=span["spanId"],
        parent=span.get("parentSpanId", ""),
        links=tuple(link["spanId"] for link in span.get("links", ())),
        start=int(span["startTimeUnixNano"]),
        end=int(span["endTimeUnixNano"]),
        kind=str(span["kind"]),
        attributes=_attributes(span),
        resource=resource,
    )


def _attributes(of: Mapping[str, Any]) -> dict[str, Any]:
    return {one["key"]: next(iter(one["value"].values())) for one in of.get("attributes", ())}


def picture(spans: Sequence[Span], parent: str, depth: int = 0) -> str:
    """Draw the spans below a parent: when each began and how long it took (ms), the instance, its name and links."""
    first, lines = spans[0].start, []
    for span in spans:
        if span.parent == parent:
            began, took = (span.start - first) / 1e6, (span.end - span.start) / 1e6
            linked = f" -> {', '.join(one.name for one in spans if one.id in span.links)}" if span.links else ""
            instance = span.resource.get("service.instance.id", "")
            lines.append(f"{began:9.1f} {took:7.1f}  {instance}  {'  ' * depth}{span.name}{linked}\n")
            lines.append(picture(spans, span.id, depth + 1))
    return "".join(lines)
