"""What looks for payloads and secrets finds them, however they are written."""

import base64
from urllib.parse import quote

import pytest

from halfway.protocol.keys import RANDOM_BYTES, key_text
from halfway.protocol.principal import PrincipalKind
from tests.support.canary import PAYLOAD, know_secrets, leaks_in
from tests.support.coordinator.rest_client import Answer

SECRET = "canary of test_canary: ü/1"
KEY = key_text(PrincipalKind.GROUP, bytes(range(RANDOM_BYTES)))


@pytest.mark.parametrize(
    "written",
    [
        SECRET.encode(),
        quote(SECRET, safe="").encode(),
        SECRET.encode().hex().upper().encode(),
        base64.b64encode(b"a" + SECRET.encode()),
        base64.urlsafe_b64encode(b"ab" + SECRET.encode() + b"c"),
    ],
    ids=["as it is", "quoted", "hexadecimal", "base64", "base64 for URLs"],
)
def test_a_coordinators_secret_is_found_however_it_is_written(written: bytes) -> None:
    know_secrets({"HALFWAY_MASTER_SECRET": SECRET, "HALFWAY_PEER_CREDENTIAL": "", "HALFWAY_LOG_LEVEL": "json-lines"})
    assert leaks_in(b'{"detail": "' + written + b'"}') == [f"HALFWAY_MASTER_SECRET: {SECRET}"]
    assert leaks_in(b'{"format": "json-lines"}') == []


@pytest.mark.parametrize("text", [KEY, "whsec_" + "A1b2" * 8], ids=["a key", "a check secret"])
def test_what_looks_like_a_secret_is_found_without_being_known(text: str) -> None:
    assert leaks_in(f"log {text}".encode()) != []


@pytest.mark.parametrize(
    "status, body",
    [
        (422, {"detail": f"value: {PAYLOAD}"}),
        (500, f"Traceback: {PAYLOAD}"),
        (200, {"prepare": [{"status": 201}, {"status": 422, "problem": {"detail": [PAYLOAD]}}], "end": []}),
        (200, {"end": [{"status": 409, "problem": {"detail": KEY}}]}),
    ],
    ids=["a problem", "plain text", "an item of a batch", "a key in an item"],
)
def test_no_answer_is_taken_whose_problem_tells_a_payload_or_a_key(status: int, body: object) -> None:
    with pytest.raises(AssertionError, match=r"payload|looks like a secret"):
        Answer(status=status, body=body, headers={})
