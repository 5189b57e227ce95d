"""Authentication by a key or a certificate: its duration, and its cost."""

import msgspec
import pytest

from halfway.coordinator.access import KeyedAccess, OpenAccess
from halfway.protocol.errors import ForbiddenError, UnauthenticatedError
from halfway.protocol.keys import RANDOM_BYTES, Key, KeyTable, MasterSecret, key_text, public_id
from halfway.protocol.principal import ANYBODY, PEER, RULES, Permission, PrincipalKind
from tests.support.surroundings import ManualClock

SECRET, OLD = MasterSecret(b"new" * 12), MasterSecret(b"old" * 12)
TEXT = key_text(PrincipalKind.GROUP, bytes(range(RANDOM_BYTES)))
OPERATOR = key_text(PrincipalKind.OPERATOR, bytes(range(1, RANDOM_BYTES + 1)))
EXPIRES_S = 60


def record(secret: MasterSecret = SECRET, text: str = TEXT, **fields: object) -> Key:
    made = Key(id=public_id(text), kind=PrincipalKind.GROUP, name="shop", created_at=0, digest=secret.digest(text))
    return secret.sealed(msgspec.structs.replace(made, **fields))


class Scene:
    def __init__(self) -> None:
        self.table, self.clock = KeyTable(), ManualClock()
        self.refused: list[str] = []
        self.access = KeyedAccess(
            self.table, [SECRET, OLD], self.clock, first_operator=OPERATOR, count_refusal=self.refused.append
        )

    def add(self, key: Key) -> None:
        self.table.apply(key.id, key)

    def refusal(self, token: str | None, *names: str) -> str:
        with pytest.raises(UnauthenticatedError) as caught:
            self.access.authenticate(token, names)
        assert token is None or token not in caught.value.detail
        return str(self.refused[-1])


@pytest.fixture
def scene() -> Scene:
    return Scene()


def test_a_key_says_who_calls(scene: Scene) -> None:
    scene.add(record())
    principal = scene.access.authenticate(TEXT)
    assert (principal.kind, principal.group, principal.key_id) == (PrincipalKind.GROUP, "shop", public_id(TEXT))
    assert scene.access.authenticate(OPERATOR).kind is PrincipalKind.OPERATOR


def test_each_refusal_is_counted_by_its_reason(scene: Scene) -> None:
    assert scene.refusal(None) == "no_key"
    assert scene.refusal("a password") == "mistyped"
    assert scene.refusal("x" * 100_000) == "mistyped"
    assert scene.refusal("hw_g_ключ") == "mistyped"
    assert scene.refusal(TEXT[:-1] + "!") == "mistyped"
    assert scene.refusal(TEXT) == "unknown_key"
    scene.add(record())
    scene.table.apply(public_id(TEXT), None)
    assert scene.refusal(TEXT) == "revoked"
    assert scene.refusal(None, "DNS:shop.svc") == "unknown_certificate"


def test_a_key_that_is_shown_again_is_not_hashed_again_while_its_record_stands(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashed: list[str] = []
    digest = MasterSecret.digest

    def counted(secret: MasterSecret, text: str) -> bytes:
        hashed.append(text)
        return digest(secret, text)

    monkeypatch.setattr(MasterSecret, "digest", counted)
    scene.add(record())
    for _ in range(3):
        assert scene.access.authenticate(TEXT).name == "shop"
    assert hashed.count(TEXT) == 2  # by `record`, and when it was first presented
    scene.add(SECRET.sealed(msgspec.structs.replace(record(), digest=b"of another text")))
    assert scene.refusal(TEXT) == "unknown_key"


def test_a_key_of_the_same_id_and_another_secret_is_refused(scene: Scene) -> None:
    scene.add(record())
    other = key_text(PrincipalKind.GROUP, bytes(range(9)) + b"another secret, of the length!!!")
    assert public_id(other) == public_id(TEXT)
    assert scene.refusal(other) == "unknown_key"


def test_a_key_expires_also_while_it_is_used(scene: Scene) -> None:
    scene.add(record(expires_at=scene.clock.now_ms() + EXPIRES_S * 1000))
    principal = scene.access.authenticate(TEXT)
    scene.access.require(principal, Permission.PREPARE, "shop")
    scene.clock.advance(EXPIRES_S)
    assert scene.refusal(TEXT) == "expired"
    with pytest.raises(UnauthenticatedError):
        scene.access.require(principal, Permission.PREPARE, "shop")


def test_a_key_that_is_revoked_is_refused_also_to_whom_it_had_let_in(scene: Scene) -> None:
    """Such as a long poll or a stream."""
    scene.add(record())
    principal = scene.access.authenticate(TEXT)
    scene.table.apply(public_id(TEXT), None)
    with pytest.raises(UnauthenticatedError):
        scene.access.require(principal, Permission.END)


def test_a_key_that_this_instance_has_not_read_yet_may_act_for_whom_another_one_let_in(scene: Scene) -> None:
    """A call that was forwarded right after the key was made."""
    scene.access.require(record().principal, Permission.END)


def test_a_forged_record_lets_nobody_in(scene: Scene) -> None:
    """A writer to the topic copies the hash of its own key into an operator's record."""
    scene.add(msgspec.structs.replace(record(), kind=PrincipalKind.OPERATOR, name="me"))
    assert scene.refusal(TEXT) == "forged"
    scene.add(record())
    assert scene.access.authenticate(TEXT).name == "shop"
    scene.add(msgspec.structs.replace(record(), name="other"))
    assert scene.refusal(TEXT) == "forged"


def test_keys_of_the_master_secret_before_hold_while_it_is_set(scene: Scene) -> None:
    scene.add(record(OLD))
    assert scene.access.authenticate(TEXT).name == "shop"
    alone = KeyedAccess(scene.table, [SECRET], scene.clock)
    with pytest.raises(UnauthenticatedError):
        alone.authenticate(TEXT)


def test_a_certificate_stands_for_a_key_and_a_key_goes_before_it(scene: Scene) -> None:
    bound = Key(
        id="cert00000000", kind=PrincipalKind.READER, name="board", created_at=0, certificate="URI:spiffe://a/b"
    )
    scene.add(SECRET.sealed(bound))
    scene.add(record())
    names = ("DNS:x", "URI:spiffe://a/b")
    assert scene.access.authenticate(None, names).name == "board"
    assert scene.access.authenticate(TEXT, names).name == "shop"
    assert scene.refusal("hw_wrong", *names) == "mistyped"


def test_of_the_names_of_a_certificate_one_whose_binding_holds_counts(scene: Scene) -> None:
    """Although the record of another name has expired. If none is valid, the refusal says so."""
    names = ("DNS:old.svc", "DNS:shop.svc")
    for number, name in enumerate(names):
        expires_at = scene.clock.now_ms() + number * EXPIRES_S * 1000
        scene.add(record(id=name, name=name, digest=None, certificate=name, expires_at=expires_at))
    assert scene.access.authenticate(None, names).name == "DNS:shop.svc"
    scene.clock.advance(EXPIRES_S)
    assert scene.refusal(None, *names) == "expired"


def test_a_refusal_names_the_caller_the_group_and_what_is_needed(scene: Scene) -> None:
    principal = record().principal
    with pytest.raises(ForbiddenError) as caught:
        scene.access.require(principal, Permission.PREPARE, "other")
    assert caught.value.detail == (
        f"group 'shop' (key {public_id(TEXT)}) may not prepare a transaction for group 'other': "
        "this needs a key of group 'other' or an operator's key"
    )
    with pytest.raises(ForbiddenError, match="this needs an operator's key"):
        scene.access.require(principal, Permission.RESUME)
    assert scene.refused == ["group", "kind"]


def test_nobody_is_let_in_by_forgetting_to_say_who_calls(scene: Scene) -> None:
    for permission in set(Permission) - {Permission.DESCRIBE}:
        with pytest.raises(UnauthenticatedError):
            scene.access.require(ANYBODY, permission)
        scene.access.require(PEER, permission, "shop")
        assert (not scene.access.may(ANYBODY, permission)) or PrincipalKind.ANYBODY in RULES[permission]


def test_under_open_access_everybody_may_do_everything() -> None:
    access = OpenAccess()
    for permission in set(Permission) - {Permission.MANAGE_KEYS}:
        access.require(access.authenticate("whatever"), permission, "shop")
        assert access.may(ANYBODY, permission)


def test_under_open_access_only_operators_make_keys(scene: Scene) -> None:
    """A key that anybody could make under open access would stay valid afterwards."""
    scene.add(record())
    access = OpenAccess(scene.access)
    assert access.authenticate(TEXT) == access.authenticate("mistyped") == access.authenticate(None) == ANYBODY
    with pytest.raises(UnauthenticatedError):
        access.require(ANYBODY, Permission.MANAGE_KEYS)
    access.require(access.authenticate(OPERATOR), Permission.MANAGE_KEYS)
    access.require(ANYBODY, Permission.DELETE_GROUP, "shop")


def test_under_open_access_secrets_are_shown_to_whom_they_belong_only(scene: Scene) -> None:
    """A secret that anybody could read under open access would still sign checks afterwards."""
    scene.add(record())
    access = OpenAccess(scene.access)
    wanted = Permission.READ_CHECK_SECRETS
    for token, error in ((None, UnauthenticatedError), ("mistyped", UnauthenticatedError), (OPERATOR, ForbiddenError)):
        with pytest.raises(error):
            access.require(access.authenticate(token, (), wanted), wanted, "shop")
    shop = access.authenticate(TEXT, (), wanted)
    access.require(shop, wanted, "shop")
    with pytest.raises(ForbiddenError):
        access.require(shop, wanted, "other")
    assert not access.may(ANYBODY, wanted, "shop")
