"""Signed checks: accepted requests, refused requests, and their errors; what an unsigned check may decide."""

import asyncio
import base64
import json
import random
import threading
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import NullPool
from sqlalchemy.ext.asyncio import create_async_engine
from standardwebhooks.webhooks import Webhook, WebhookVerificationError

from halfway.checks.caller import signed_headers
from halfway.client import (
    Check,
    CheckVerifier,
    Halfway,
    InvalidSecretError,
    InvalidSignatureError,
    Message,
    SyncHalfway,
    answer_check,
    answer_check_sync,
)
from halfway.client.barrier import AsyncBarrier, Barrier
from halfway.protocol.keys import CheckSecrets, derived, hkdf
from tests.support.client.shop import transactional
from tests.support.ids import named_id
from tests.support.rest.client import RestWorld

MASTER, OLD_MASTER = b"m" * 32, b"o" * 32
SECRETS = CheckSecrets([MASTER])
[SECRET] = SECRETS.shown("shop")
BODY = json.dumps(
    {
        "type": "transaction.check",
        "nonce": "n-1",
        "id": "o-42",
        "group": "shop",
        "prepared_at": "2026-01-01T00:00:00.000Z",
        "attempt": 1,
        "messages": [],
    }
).encode()


class Now:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.s = datetime.now(UTC).timestamp()

    def __call__(self) -> float:
        return self.s


@pytest.fixture
def now() -> Now:
    return Now()


@pytest.fixture
def verifier(now: Now) -> CheckVerifier:
    return CheckVerifier(SECRET, clock=now)


def signed(body: bytes = BODY, *, check_id: str = "o-42:1", secrets: CheckSecrets = SECRETS) -> dict[str, str]:
    return dict(signed_headers(check_id, body, secrets.of("shop")))


def test_secrets_are_derived_as_rfc_5869_has_it_and_differ_by_group_and_master() -> None:
    """A group's secret reveals nothing about another's; every instance derives the same secrets."""
    vector = hkdf(b"\x0b" * 22, salt=bytes(range(13)), info=bytes(range(0xF0, 0xFA)))
    assert vector.hex() == "3cb25f25faacd57a90434f64d0362f2a2d2d0a90cf1a5a4c5db02d56ecc4c5bf"
    groups = {SECRETS.of(group)[0] for group in ("shop", "shop2", "Shop", "")}
    assert len(groups | {CheckSecrets([OLD_MASTER]).of("shop")[0], derived(MASTER, "keys")}) == 6
    assert CheckSecrets([MASTER]).of("shop") == SECRETS.of("shop")


def test_what_halfway_signs_is_accepted_whatever_the_case_of_its_headers(verifier: CheckVerifier) -> None:
    verifier.verify(BODY, {name.title(): value for name, value in signed().items()})


def test_the_library_standardwebhooks_accepts_what_halfway_signs() -> None:
    assert Webhook(SECRET).verify(BODY, signed()) == json.loads(BODY)
    with pytest.raises(WebhookVerificationError):
        Webhook(SECRET).verify(BODY + b" ", signed())


def test_what_the_library_standardwebhooks_signs_is_accepted(verifier: CheckVerifier, now: Now) -> None:
    at = datetime.fromtimestamp(int(now.s), UTC)
    signature = Webhook(SECRET).sign("o-42:1", at, BODY.decode())
    headers = {"webhook-id": "o-42:1", "webhook-timestamp": str(int(now.s)), "webhook-signature": signature}
    verifier.verify(BODY, headers)


@pytest.mark.parametrize(
    "name, value",
    [
        ("webhook-id", "o-43:1"),
        ("webhook-id", ""),
        ("webhook-timestamp", "0"),
        ("webhook-timestamp", "-1"),
        ("webhook-timestamp", "١٢٣"),
        ("webhook-timestamp", "9" * 5000),
        ("webhook-signature", "v1,"),
        ("webhook-signature", "v1a,AAAA"),
        ("webhook-signature", "v1,é"),
    ],
)
def test_a_changed_header_is_refused(verifier: CheckVerifier, name: str, value: str) -> None:
    with pytest.raises(InvalidSignatureError):
        verifier.verify(BODY, signed() | {name: value})


@pytest.mark.parametrize("name", ["webhook-id", "webhook-timestamp", "webhook-signature"])
def test_a_header_that_is_missing_or_given_twice_is_refused(verifier: CheckVerifier, name: str) -> None:
    headers = signed()
    with pytest.raises(InvalidSignatureError, match=name):
        verifier.verify(BODY, {key: value for key, value in headers.items() if key != name})
    with pytest.raises(InvalidSignatureError, match="twice"):
        verifier.verify(BODY, [*headers.items(), (name.upper(), headers[name])])


def test_another_body_or_another_groups_signature_is_refused(verifier: CheckVerifier) -> None:
    """A group cannot forge a check of another: it does not know its secret."""
    with pytest.raises(InvalidSignatureError):
        verifier.verify(BODY + b" ", signed())
    with pytest.raises(InvalidSignatureError):
        verifier.verify(BODY, dict(signed_headers("o-42:1", BODY, SECRETS.of("other"))))


def test_while_the_master_secret_is_rotated_either_secret_verifies() -> None:
    """Old and new instances sign at the same time, and services may take the new secret at any time."""
    both = CheckSecrets([MASTER, OLD_MASTER])
    new, old = both.shown("shop")
    for secrets in (both, CheckSecrets([OLD_MASTER])):
        CheckVerifier(old).verify(BODY, signed(secrets=secrets))
        CheckVerifier(new, old).verify(BODY, signed(secrets=secrets))
        Webhook(old).verify(BODY, signed(secrets=secrets))
    with pytest.raises(InvalidSignatureError):
        CheckVerifier(old).verify(BODY, signed(secrets=CheckSecrets([MASTER])))


def test_a_copy_of_a_check_is_refused_at_once_and_after_five_minutes(now: Now) -> None:
    """At once by the verifier that has seen it, by any process after five minutes; and too early, by a slow clock."""
    headers = signed()
    verifier, other_process = CheckVerifier(SECRET, clock=now), CheckVerifier(SECRET, clock=now)
    verifier.verify(BODY, headers)
    with pytest.raises(InvalidSignatureError, match="a copy of an earlier one"):
        verifier.verify(BODY, headers)
    now.s = int(headers["webhook-timestamp"]) + 300
    with pytest.raises(InvalidSignatureError, match="a copy of an earlier one"):
        verifier.verify(BODY, headers)
    now.s += 1.1
    for one in (verifier, other_process):
        with pytest.raises(InvalidSignatureError, match="300 s away"):
            one.verify(BODY, headers)
    now.s = int(headers["webhook-timestamp"]) - 301
    with pytest.raises(InvalidSignatureError, match="300 s away"):
        other_process.verify(BODY, headers)


def test_halfways_own_second_try_of_a_check_is_accepted(verifier: CheckVerifier) -> None:
    """It has the same id and another nonce, because the answer to the first may have been lost."""
    again = BODY.replace(b"n-1", b"n-2")
    first, second = signed(), signed(again)
    assert first["webhook-id"] == second["webhook-id"]
    verifier.verify(BODY, first)
    verifier.verify(again, second)


def test_what_is_remembered_is_bounded_and_forgotten_with_time(now: Now) -> None:
    verifier = CheckVerifier(SECRET, clock=now, remember=3)
    for number in range(10):
        verifier.verify(BODY, signed(check_id=f"o-{number}:1"))
    assert len(verifier._seen) == 3
    now.s += 200
    verifier.verify(BODY, dict(signed(check_id="late:1")))
    now.s += 1000
    later = str(int(now.s))
    signature = Webhook(SECRET).sign("later:1", datetime.fromtimestamp(int(later), UTC), BODY.decode())
    verifier.verify(BODY, {"webhook-id": "later:1", "webhook-timestamp": later, "webhook-signature": signature})
    assert len(verifier._seen) == 1


def test_of_many_threads_that_bring_one_check_one_is_accepted(verifier: CheckVerifier) -> None:
    headers, accepted = signed(), []

    def verify() -> None:
        try:
            verifier.verify(BODY, headers)
        except InvalidSignatureError:
            return
        accepted.append(1)

    threads = [threading.Thread(target=verify) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(accepted) == 1


ALPHABET: list[str] = [*",=+/A\u00e9\udc80\x00\n09.\U0001d7d9-e ", "v1,", "v1", "v1a,"]


def test_a_hundred_thousand_headers_of_any_content_raise_one_error() -> None:
    """Fuzzed from a seed: pieces of real headers, bytes that are not text, too large numbers, wrong base64."""
    seed = random.randrange(2**32)
    chance = random.Random(seed)
    verifier = CheckVerifier(SECRET)
    real = signed()
    names = list(real)

    def fuzz(value: str) -> str:
        kind = chance.randrange(4)
        if kind == 0:
            return "".join(chance.choices(ALPHABET, k=chance.randrange(12)))
        if kind == 1:
            at = chance.randrange(len(value))
            return value[:at] + chance.choice(ALPHABET) + value[at + chance.randrange(2) :]
        if kind == 2:
            return base64.b64encode(chance.randbytes(chance.randrange(40))).decode()
        return value * chance.randrange(3)

    for number in range(100_000):
        headers: Mapping[str, str] = real | {name: fuzz(real[name]) for name in chance.sample(names, 1 + number % 3)}
        if dict(headers) == real:
            continue
        try:
            verifier.verify(BODY, headers)
        except InvalidSignatureError:
            continue
        except Exception as error:
            raise AssertionError(f"seed {seed}: {headers!r}") from error
        # The signature may be among others, as during a rotation; nothing else is accepted.
        assert real["webhook-signature"] in headers["webhook-signature"].split(" "), f"seed {seed}: {headers!r}"
        assert (headers["webhook-id"], headers["webhook-timestamp"]) == (real["webhook-id"], real["webhook-timestamp"])


@pytest.mark.parametrize("secret", ["", "whsec_", "whsec_%%%", "whsec_AAAA", "short", "whsec_é"])
def test_what_is_no_secret_is_refused_without_showing_it(secret: str) -> None:
    with pytest.raises(InvalidSecretError) as raised:
        CheckVerifier(secret)
    assert len(secret) < 7 or secret not in str(raised.value)
    with pytest.raises(InvalidSecretError):
        CheckVerifier()


def test_nothing_shows_the_secret(verifier: CheckVerifier) -> None:
    assert SECRET not in repr(verifier)
    with pytest.raises(InvalidSignatureError) as raised:
        verifier.verify(BODY, signed() | {"webhook-signature": "v1,AAAA"})
    assert SECRET not in str(raised.value)


ORDER = Message(topic="orders", key="42", value="paid")
LATER = named_id("later")
NOW = named_id("now")


def question(transaction_id: str, group: str = "shop") -> bytes:
    now = datetime.now(UTC).isoformat()
    check = {"type": "transaction.check", "id": transaction_id, "group": group, "prepared_at": now}
    return json.dumps({**check, "attempt": 1, "messages": []}).encode()


def outcome(answer: tuple[int, bytes]) -> str:
    return str(json.loads(answer[1])["outcome"])


async def test_it_takes_no_id_that_the_service_will_use_later(world: RestWorld, barrier: Barrier) -> None:
    """A transaction that is pending is decided; so is one that has a row, without asking halfway."""
    async with Halfway(world.url, "shop", barrier=barrier) as client:
        asked = [outcome(await answer_check(question(LATER, group), barrier.decide)) for group in ("shop", "bank")]
        assert asked == ["unknown", "unknown"]
        await client.prepare([ORDER], id=NOW)
        assert outcome(await answer_check(question(NOW, "bank"), barrier.decide)) == "unknown"
        assert outcome(await answer_check(question(NOW), barrier.decide)) == "rollback"
        async with client.transaction([ORDER], id=LATER) as transaction:
            with barrier._connect() as connection:
                barrier.insert(connection, transaction.id)
        assert outcome(await answer_check(question(LATER), barrier.decide)) == "commit"


async def test_the_same_with_a_client_for_threads(world: RestWorld, barrier: Barrier) -> None:
    def service() -> list[str]:
        def ask(transaction_id: str) -> str:
            return outcome(answer_check_sync(question(transaction_id), barrier.decide))

        with SyncHalfway(world.url, "shop", barrier=barrier) as client:
            client.prepare([ORDER], id=NOW)
            return [ask(LATER), ask(NOW), ask(LATER)]

    assert await asyncio.to_thread(service) == ["unknown", "rollback", "unknown"]


async def test_the_same_with_an_asynchronous_barrier(world: RestWorld, tmp_path: Path) -> None:
    engine = create_async_engine(f"sqlite+aiosqlite:///{tmp_path / 'shop.sqlite'}", poolclass=NullPool)
    transactional(engine.sync_engine)
    barrier = AsyncBarrier("sqlite", engine.begin)
    await barrier.create()
    async with Halfway(world.url, "shop", barrier=barrier) as client:
        await client.prepare([ORDER], id=NOW)
        found = [outcome(await answer_check(question(each), barrier.decide)) for each in (LATER, NOW)]
    assert found == ["unknown", "rollback"]
    await engine.dispose()


async def test_a_check_that_is_certain_needs_no_confirmation(world: RestWorld, barrier: Barrier) -> None:
    """It was signed, or fetched."""
    async with Halfway(world.url, "shop", barrier=barrier):
        document = json.loads(question("signed"))
        certain = Check.from_json(document, is_verified=True)
        assert await asyncio.to_thread(barrier.decide, certain) == "rollback"


@pytest.mark.parametrize("close", [True, False], ids=["closed client", "no client"])
async def test_without_a_client_that_can_be_asked_it_is_decided(
    world: RestWorld, barrier: Barrier, *, close: bool
) -> None:
    """Only a verifier protects then."""
    clients: list[Any] = []
    make: Callable[..., Any] = Halfway
    if close:
        async with make(world.url, "shop", barrier=barrier) as client:
            clients.append(client)
    assert outcome(await answer_check(question(LATER), barrier.decide)) == "rollback"


async def test_a_halfway_that_gives_no_answer_leaves_the_check_open(barrier: Barrier) -> None:
    async with Halfway("http://127.0.0.1:1", "shop", barrier=barrier):
        assert outcome(await answer_check(question(LATER), barrier.decide, within_s=30)) == "unknown"
