"""The form of keys, their stored records, and the table of keys."""

import os
import re

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfway.protocol.keys import FORM, KINDS, RANDOM_BYTES, Key, KeyTable, MasterSecret, key_text, kind_in, public_id
from halfway.protocol.principal import Principal, PrincipalKind

RANDOM = st.binary(min_size=RANDOM_BYTES, max_size=RANDOM_BYTES)
KEY = Key(id="0123456789AB", kind=PrincipalKind.GROUP, name="shop", created_at=1, digest=b"d" * 32)
BOUND = msgspec.structs.replace(KEY, id="CD0123456789", digest=None, certificate="DNS:shop.svc")


@given(random=RANDOM, kind=st.sampled_from(sorted(KINDS)))
def test_a_key_has_a_form_that_scanners_find_and_says_its_kind(random: bytes, kind: PrincipalKind) -> None:
    text = key_text(kind, random)
    assert re.search(FORM, f"in = '{text}';") is not None
    assert kind_in(text) is kind
    assert len(public_id(text)) == 12
    assert text.isascii()


@given(random=RANDOM, at=st.integers(0, 67), other=st.characters(codec="ascii"))
def test_a_mistyped_key_is_told_from_a_wrong_one(random: bytes, at: int, other: str) -> None:
    """A change of any one character breaks the checksum or the form."""
    text = key_text(PrincipalKind.GROUP, random)
    mistyped = text[:at] + other + text[at + 1 :]
    assert (kind_in(mistyped) is not None) == (mistyped == text)


def test_two_keys_differ_in_id_and_secret() -> None:
    texts = {key_text(PrincipalKind.READER, os.urandom(RANDOM_BYTES)) for _ in range(1000)}
    assert len(texts) == len({public_id(text) for text in texts}) == 1000


@pytest.mark.parametrize(
    "changed",
    [
        {"kind": PrincipalKind.OPERATOR},
        {"name": "other"},
        {"id": "ZZ0123456789"},
        {"expires_at": 5},
        {"digest": b"e" * 32},
        {"certificate": "DNS:evil"},
        {"created_at": 2},
    ],
)
def test_a_record_that_somebody_else_changed_has_no_valid_seal(changed: dict[str, object]) -> None:
    """A caller gains nothing if it copies the hash of its own key into an operator's record."""
    secret = MasterSecret(b"a" * 32)
    sealed = secret.sealed(KEY)
    assert secret.has_sealed(sealed)
    assert not secret.has_sealed(msgspec.structs.replace(sealed, **changed))
    assert not MasterSecret(b"b" * 32).has_sealed(sealed)


def test_the_table_follows_the_log() -> None:
    table = KeyTable()
    table.apply(KEY.id, KEY)
    table.apply(BOUND.id, BOUND)
    assert table.all() == [KEY, BOUND]
    assert table.bound_to("DNS:shop.svc") == BOUND
    assert not table.is_revoked(KEY.id)
    table.apply(BOUND.id, None)
    table.apply(KEY.id, None)
    assert (len(table), table.get(KEY.id), table.bound_to("DNS:shop.svc")) == (0, None, None)
    assert table.is_revoked(KEY.id)
    assert not table.is_revoked("never there")
    table.apply(KEY.id, KEY)
    assert table.get(KEY.id) is None


def test_a_certificate_goes_on_with_its_later_record() -> None:
    table = KeyTable()
    later = msgspec.structs.replace(BOUND, id="later0123456")
    table.apply(BOUND.id, BOUND)
    table.apply(later.id, later)
    table.apply(BOUND.id, None)
    assert table.bound_to("DNS:shop.svc") == later


def test_what_is_logged_of_a_principal_is_its_public_id() -> None:
    assert str(KEY.principal) == "group 'shop' (key 0123456789AB)"
    assert str(Principal(kind=PrincipalKind.PEER)) == "peer"


def test_a_certificate_that_was_bound_twice_is_bound_as_long_as_one_binding_stands() -> None:
    """Two instances may bind it at the same time: the later record counts, and each can be revoked, in any order."""
    later = msgspec.structs.replace(BOUND, id="later0123456")
    for first, second in ((BOUND, later), (later, BOUND)):
        table = KeyTable()
        table.apply(BOUND.id, BOUND)
        table.apply(later.id, later)
        assert table.bound_to("DNS:shop.svc") == later
        table.apply(first.id, None)
        assert table.bound_to("DNS:shop.svc") == second
        table.apply(second.id, None)
        assert table.bound_to("DNS:shop.svc") is None


def test_a_record_from_before_a_rotation_does_not_bring_an_expired_key_back() -> None:
    """Its seal is valid, so any writer to the topic could send it again. A record with an earlier expiry is applied."""
    table = KeyTable()
    ending = msgspec.structs.replace(KEY, expires_at=5)
    for record in (KEY, ending, KEY, msgspec.structs.replace(KEY, expires_at=6)):
        table.apply(KEY.id, record)
    assert table.get(KEY.id) == ending
    sooner = msgspec.structs.replace(KEY, expires_at=4)
    table.apply(KEY.id, sooner)
    assert table.get(KEY.id) == sooner
