"""The `repr` of objects never shows a secret or a payload."""

import msgspec
import pytest

from halfway.app.settings import load
from halfway.checks import HttpCheckCaller
from halfway.client import CheckVerifier, Halfway
from halfway.coordinator.ports import CheckRequest
from halfway.coordinator.requests import Prepare
from halfway.http.requests.models import CheckSecretsResponse, PrepareRequest
from halfway.protocol.keys import CheckSecrets, MasterSecret
from halfway.protocol.records import Half, Message, Origin, Parked
from tests.support.canary import Canaries

SECRET, VALUE = "canary-secret-of-32-bytes-or-more", b"canary-payload"
CHECK_SECRETS = CheckSecrets([SECRET.encode()])
MESSAGE = Message(topic="orders", key=VALUE, value=VALUE, headers=(("trace", VALUE),))
HALF = Half(
    id="o-42", group="shop", messages=(MESSAGE,), prepared_at=1, since=1, fingerprint=b"", check_after_ms=None,
    origin=Origin.PREPARE, checks=0, checked_at=None, commit_verdict=False, remark=None,
)  # fmt: skip
BODY = {"group": "shop", "messages": [{"topic": "orders", "key": VALUE.decode(), "value": VALUE.decode()}]}


@pytest.mark.parametrize(
    "shown",
    [
        MESSAGE,
        HALF,
        Parked(half=HALF, reason="", parked_at=1, checks=1),
        Prepare(group="shop", messages=(MESSAGE,)),
        CheckRequest(check_id="o-42:1", id="o-42", group="shop", prepared_at=1, attempt=1, messages=(MESSAGE,)),
        msgspec.convert(BODY, PrepareRequest),
        load(
            {
                "HALFWAY_MASTER_SECRET": SECRET,
                "HALFWAY_MASTER_SECRET_PREVIOUS": SECRET,
                "HALFWAY_PEER_CREDENTIAL": SECRET,
                "HALFWAY_CHECK_PROXY": f"http://user:{SECRET}@proxy:3128",
                "HALFWAY_KAFKA__SASL_PASSWORD": SECRET,
            }
        ),
        MasterSecret(SECRET.encode()),
        CHECK_SECRETS,
        CheckSecretsResponse(group="shop", secrets=list(CHECK_SECRETS.shown("shop"))),
        CheckVerifier(*CHECK_SECRETS.shown("shop")),
        HttpCheckCaller(secrets_of=CHECK_SECRETS.of, proxy=f"http://user:{SECRET}@proxy:3128"),
        Halfway("http://halfway:8080", "shop", key=f"hw_{SECRET}"),
    ],
    ids=lambda shown: type(shown).__name__,
)
def test_nothing_shows_a_secret_or_a_payload(shown: object) -> None:
    [check_secret] = CHECK_SECRETS.shown("shop")
    canaries = Canaries({"secret": SECRET, "payload": VALUE, "check secret": check_secret.removeprefix("whsec_")})
    assert canaries.found_in(repr(shown)) == []
    assert canaries.found_in(str(shown)) == []
