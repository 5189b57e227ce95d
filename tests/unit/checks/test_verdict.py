"""What counts as a verdict."""

import pytest

from halfway.checks.caller import NotAVerdictError, is_json, read_verdict
from halfway.protocol.records import MAX_REMARK_BYTES
from halfway.protocol.transactions import Outcome

NONCE = "Zk3vN0pQ1rS5tUwXyZ-_ab"


@pytest.mark.parametrize("outcome", list(Outcome))
def test_each_outcome_in_its_own_spelling_is_a_verdict(outcome: Outcome) -> None:
    """The three outcomes are read, with white space around them as JSON allows."""
    assert read_verdict(f' {{"outcome": "{outcome.value}"}}\n'.encode(), NONCE) == (outcome, None, False)


def test_other_fields_are_let_through() -> None:
    """A service may send additional fields."""
    body = b'{"order": {"id": 7, "outcome": "rollback"}, "outcome": "commit", "tags": []}'
    assert read_verdict(body, NONCE) == (Outcome.COMMIT, None, False)


def test_an_echoed_nonce_binds_the_verdict_to_its_question() -> None:
    """Only the exact string counts, and only next to the outcome."""
    bound = b'{"outcome": "rollback", "nonce": "Zk3vN0pQ1rS5tUwXyZ-_ab", "remark": "never came"}'
    assert read_verdict(bound, NONCE) == (Outcome.ROLLBACK, "never came", True)
    elsewhere = b'{"outcome": "rollback", "question": {"nonce": "Zk3vN0pQ1rS5tUwXyZ-_ab"}}'
    assert not read_verdict(elsewhere, NONCE).bound


def test_a_remark_is_kept_and_cut_to_its_limit() -> None:
    """A remark of any length does not affect the verdict, and is cut between characters."""
    body = '{{"outcome": "rollback", "remark": "{}"}}'.format("\u00e9" * 5000).encode()
    outcome, remark, _ = read_verdict(body, NONCE)
    assert (outcome, remark) == (Outcome.ROLLBACK, "\u00e9" * (MAX_REMARK_BYTES // 2))


@pytest.mark.parametrize("remark", ["7", "null", '{"a": 1}', "[]"])
def test_a_remark_that_is_no_string_is_left_out(remark: str) -> None:
    """The verdict counts without it."""
    assert read_verdict(f'{{"outcome": "commit", "remark": {remark}}}'.encode(), NONCE)[:2] == (Outcome.COMMIT, None)


def test_a_remark_with_half_a_character_is_text_afterwards() -> None:
    """A lone surrogate, which JSON can contain, is replaced, because UTF-8 cannot encode it."""
    _, remark, _ = read_verdict(b'{"outcome": "commit", "remark": "\\ud800!"}', NONCE)
    assert remark == "?!"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"commit",
        b'"commit"',
        b"null",
        b'["commit"]',
        b'[{"outcome": "commit"}]',
        b"{}",
        b'{"outcome": "COMMITTED"}',
        b'{"outcome": "COMMIT"}',
        b'{"outcome": "Commit"}',
        b'{"outcome": " commit"}',
        b'{"outcome": "commit\\u0000"}',
        b'{"outcome": "committed"}',
        b'{"outcome": ""}',
        b'{"outcome": null}',
        b'{"outcome": true}',
        b'{"outcome": 0}',
        b'{"outcome": ["commit"]}',
        b'{"outcome": {"outcome": "commit"}}',
        b'{"Outcome": "commit"}',
        b'{"result": {"outcome": "commit"}}',
        b'{"outcome": "commit"} and so on',
        b'{"outcome": "commit"}{"outcome": "commit"}',
        b'{"outcome": "commit"},',
        b'{"outcome": "commit",}',
        b'{"outcome": "commit"',
        b"{'outcome': 'commit'}",
        b'{outcome: "commit"}',
        b'{"outcome": "commit"} // done',
        b'{"outcome": "commit", "outcome": "rollback"}',
        b'{"outcome": "rollback", "outcome": "commit"}',
        b'{"outcome": "commit", "outcome": "commit"}',
        b'{"outcome": "commit", "\\u006futcome": "rollback"}',
        b'{"outcome": "commit", "nonce": "that of another question"}',
        b'{"outcome": "commit", "nonce": null}',
        b'{"outcome": "commit", "nonce": ["Zk3vN0pQ1rS5tUwXyZ-_ab"]}',
        b'{"outcome": "commit", "nonce": "Zk3vN0pQ1rS5tUwXyZ-_ab ", "a": 1}',
        b'{"outcome": "commit", "nonce": "Zk3vN0pQ1rS5tUwXyZ-_ab", "nonce": "Zk3vN0pQ1rS5tUwXyZ-_ab"}',
        b'{"outcome": "commit", "cost": NaN}',
        b'{"outcome": "commit", "cost": -Infinity}',
        b'\xef\xbb\xbf{"outcome": "commit"}',
        b'{"outcome": "commit", "remark": "\xff"}',
        '{"outcome": "commit"}'.encode("utf-16"),
        b'{"outcome": "commit", "a": ' + b"[" * 60_000,
        b'{"outcome": "commit", "a": ' + b"9" * 60_000 + b"}",
        b"<html><body>commit</body></html>",
    ],
    ids=lambda body: repr(body[:70]),
)
def test_anything_else_is_no_verdict(body: bytes) -> None:
    """Everything except one object with one valid outcome is refused."""
    with pytest.raises(NotAVerdictError) as caught:
        read_verdict(body, NONCE)
    assert "commit" not in str(caught.value).replace("is not commit, rollback or unknown", "")
    assert NONCE not in str(caught.value)


@pytest.mark.parametrize(
    "content_type, accepted",
    [
        ("application/json", True),
        ("application/vnd.orders.v1+json", True),
        ("text/html", False),
        ("text/json", False),
        ("text/plain", False),
        ("application/jsonp", False),
        ("application/octet-stream", False),
        ("image/svg+json", False),
    ],
)
def test_only_a_json_media_type_holds_a_verdict(content_type: str, accepted: bool) -> None:
    """The answer must declare itself as JSON."""
    assert is_json(content_type) is accepted
