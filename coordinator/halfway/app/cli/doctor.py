"""`halfway doctor`: looks at all that a start needs, at the endpoints that it calls, and at the instances that run."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from email.utils import parsedate_to_datetime
from functools import partial
from http import HTTPStatus
from typing import Final

import aiohttp
from confluent_kafka import KafkaError, Message

from halfway.app.cli.administration import ANSWER_S
from halfway.app.metrics import Metrics
from halfway.app.serve.addresses import demand_guarded
from halfway.app.serve.backend import check_authorities, check_caller, trusting
from halfway.app.serve.process import configure, raise_limit
from halfway.app.settings import Settings
from halfway.app.terminal import json_line, say, say_rows
from halfway.coordinator.records import CREDENTIAL_HEADER, PATH
from halfway.kafka.clients.config import KafkaConfig
from halfway.kafka.clients.librdkafka_events import THROTTLING
from halfway.kafka.log.registries import KafkaGroups
from halfway.kafka.topics.provisioning import MAX_SKEW_S, Finding, InternalTopics
from halfway.protocol.errors import ConfigurationError, HalfwayError, KafkaUnavailableError

_GATEWAY: Final = (HTTPStatus.BAD_GATEWAY, HTTPStatus.SERVICE_UNAVAILABLE, HTTPStatus.GATEWAY_TIMEOUT)
_QUOTAS: Final = "quotas"
_TRIED_S: Final = 30.0
_REMEDY: Final = "give all instances the same HALFWAY_MASTER_SECRET or HALFWAY_PEER_CREDENTIAL"


def examine(load: Callable[[], Settings], destinations: Sequence[str], *, as_json: bool) -> int:
    """Print what a start needs and whether it is there; return exit status 1 if something is wrong."""
    configure(level="critical")  # the findings say it
    try:
        findings = _look(load(), destinations)
    except ConfigurationError as error:
        findings = [Finding(check="settings", ok=False, detail=error.detail)]
    shown = {True: "ok", False: "wrong", None: "unknown"}
    if as_json:
        say(json_line([{"check": one.check, "result": shown[one.ok], "detail": one.detail} for one in findings]))
    else:
        say_rows(("result", "check", "detail"), [(shown[one.ok], one.check, one.detail) for one in findings])
    return int(any(one.ok is False for one in findings))


def _look(settings: Settings, destinations: Sequence[str]) -> list[Finding]:
    peers = partial(trusting, "HALFWAY_PEER_CA_FILE", settings.peer_ca_file)
    findings = [
        Finding.of("access to the API", partial(demand_guarded, settings)),
        Finding.of("authorities of check endpoints", partial(check_authorities, settings)),
        Finding.of("authorities of other instances", peers),
        Finding.of("open files", lambda: f"enough for {raise_limit():,} connections of clients"),
    ]

    async def look() -> None:
        config = settings.kafka_config("")
        topics = InternalTopics(config)
        try:
            findings.extend(found := await topics.examine(destinations))
            command = f"kafka-configs.sh --bootstrap-server {config.for_tools} --describe --entity-type users"
            quotas = f"only `{command}` shows them (also with clients, and with both types)"
            if all(one.ok for one in found):
                findings.append(await asyncio.to_thread(Finding.of, _QUOTAS, partial(_try_quotas, config, quotas)))
                findings.extend(await _endpoints(settings))
                findings.extend(await _instances(settings, await topics.instances()))
            else:
                findings.append(Finding(check=_QUOTAS, ok=None, detail=f"not tried before the rest is ok; {quotas}"))
        finally:
            topics.close()

    try:
        asyncio.run(look())
    except HalfwayError as error:
        findings.append(Finding(check="Kafka", ok=False, detail=error.detail))
    return findings


def _try_quotas(config: KafkaConfig, shown: str) -> str:
    """Send each leader of owners a record that Kafka refuses, without a key: if a quota is used up, it delays that."""
    refusals: list[KafkaError | None] = []

    def note(error: KafkaError | None, _message: Message) -> None:
        refusals.append(error)

    producer = config.make_producer(**{"enable.idempotence": False, "message.timeout.ms": round(_TRIED_S * 1000)})
    for shard in range(config.shards):
        producer.produce(config.owners_topic, b"", None, shard, on_delivery=note)
    producer.flush(_TRIED_S)
    if THROTTLING.seconds:
        raise ConfigurationError(
            f"brokers have delayed requests by {THROTTLING.seconds:.1f} s, as a quota of halfway's user or client id "
            f"is used up: raise it; {shown}"
        )
    if [one and one.code() for one in refusals] != [KafkaError.INVALID_RECORD] * config.shards:
        raise KafkaUnavailableError(f"not each broker has answered as expected: try again (got {refusals})")
    return f"they delay no request now; {shown}"


async def _endpoints(settings: Settings) -> Iterable[Finding]:
    """Look at whether the check endpoints of each registered group may be called, and answer from here."""
    table = KafkaGroups(settings.kafka_config(""), Metrics())

    async def look(group: str, url: str) -> Finding:
        attempt = await caller.reach(group, url)
        bad = attempt.detail or (f"HTTP {attempt.status}" if attempt.status in _GATEWAY else "")
        return Finding(check=f"check endpoint {attempt.host} of group {group}", ok=not bad, detail=bad or "it answers")

    try:
        await table.start(deadline=asyncio.get_running_loop().time() + ANSWER_S)
        async with check_caller(settings) as caller:
            return await asyncio.gather(*(look(group.name, url) for group in table.all() for url in group.urls))
    finally:
        await table.stop()


async def _instances(settings: Settings, urls: Iterable[str]) -> list[Finding]:
    """Ask each instance for the port of other instances: it shows its clock, and whether it takes the credential."""
    ssl = trusting("HALFWAY_PEER_CA_FILE", settings.peer_ca_file)()
    headers = dict(zip([CREDENTIAL_HEADER], settings.peer_credentials, strict=False))
    findings = []
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=ANSWER_S), headers=headers) as session:
        for url in urls:
            wrong, before = "", time.time()
            try:
                async with session.get(f"{url}{PATH}", allow_redirects=False, ssl=ssl) as response:
                    now = parsedate_to_datetime(response.headers["Date"]).timestamp()
                skew = max(before - now - 1, now - time.time(), 0)  # the header has whole seconds
                if headers and response.status != HTTPStatus.UPGRADE_REQUIRED:
                    wrong = f"it does not accept the credential of these settings: {_REMEDY}"
                elif skew > MAX_SKEW_S:
                    wrong = f"its clock is {skew:.0f} s from the one here: set both right (NTP)"
            except (aiohttp.ClientError, TimeoutError, ValueError, KeyError) as error:
                wrong = f"it cannot be reached from here ({type(error).__name__}): see its HALFWAY_INSTANCE_URL"
            findings.append(Finding(check=f"instance {url}", ok=not wrong, detail=wrong or "ok"))
    if len(findings) > 1 and not headers:
        findings.append(Finding(check="several instances", ok=False, detail=f"they cannot call each other: {_REMEDY}"))
    return findings
