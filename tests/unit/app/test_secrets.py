"""Settings that protect the interface: secrets, keys, certificates, and the refusal to serve everybody."""

from pathlib import Path

import msgspec
import pytest

from halfway.app.settings import Settings, load
from halfway.checks import HttpCheckCaller
from halfway.client import CheckVerifier, Halfway
from halfway.coordinator.ports import CheckRequest
from halfway.coordinator.requests import Prepare
from halfway.http.requests.models import CheckSecretsResponse, PrepareRequest
from halfway.protocol.errors import ConfigurationError
from halfway.protocol.keys import RANDOM_BYTES, CheckSecrets, MasterSecret, key_text
from halfway.protocol.principal import PrincipalKind
from halfway.protocol.records import Half, Message, Origin, Parked
from tests.support.canary import Canaries

BROKER = {"HALFWAY_KAFKA__BOOTSTRAP_SERVERS": "127.0.0.1:9092"}
GUARDED = {**BROKER, "HALFWAY_MASTER_SECRET": "m" * 32}
OPERATOR_KEY = key_text(PrincipalKind.OPERATOR, bytes(range(RANDOM_BYTES)))


def test_a_master_secret_asks_for_keys_and_makes_the_peers_credential() -> None:
    settings = load({**GUARDED, "HALFWAY_MASTER_SECRET_PREVIOUS": "o" * 32})
    assert settings.access_control
    assert not load({**GUARDED, "HALFWAY_OPEN_ACCESS": "true"}).access_control
    shown, before = settings.peer_credentials
    assert load(GUARDED).peer_credentials == (shown,)
    chosen = load({**GUARDED, "HALFWAY_PEER_CREDENTIAL": "c" * 16}).peer_credentials
    assert chosen == ("c" * 16, shown)
    assert before not in chosen


SECRETS = {
    "HALFWAY_MASTER_SECRET": "m" * 32,
    "HALFWAY_MASTER_SECRET_PREVIOUS": "n" * 32,
    "HALFWAY_OPERATOR_KEY": OPERATOR_KEY,
    "HALFWAY_PEER_CREDENTIAL": "p" * 16,
    "HALFWAY_CHECK_PROXY": "http://user:word@proxy:3128",
    "HALFWAY_KAFKA__SASL_PASSWORD": "open sesame",
    "HALFWAY_KAFKA__SSL_KEY_PASSWORD": "key word",
}


def test_every_secret_can_stand_in_a_file(tmp_path: Path) -> None:
    """As secret stores mount them; the white space around is not part of it."""
    files = {}
    for name, secret in SECRETS.items():
        (tmp_path / name).write_text(f"{secret}\n")
        files[f"{name}_FILE"] = str(tmp_path / name)
    plain, read = load({**BROKER, **SECRETS}), load({**BROKER, **files})
    for name, field in Settings.model_fields.items():
        if "SecretStr" in str(field.annotation) and name != "kafka":
            assert f"HALFWAY_{name.upper()}" in SECRETS
            assert getattr(read, name).get_secret_value() == getattr(plain, name).get_secret_value(), name
            assert "*" in str(getattr(read, name))
    assert read.kafka_config("http://here").properties["ssl.key.password"] == "key word"
    assert read.master_secrets == (b"m" * 32, b"n" * 32)


def test_a_master_secret_in_a_file_may_be_any_bytes(tmp_path: Path) -> None:
    file = tmp_path / "master"
    file.write_bytes(bytes(range(128, 192)))
    assert load({**BROKER, "HALFWAY_MASTER_SECRET_FILE": str(file)}).master_secrets == (bytes(range(128, 192)),)


@pytest.mark.parametrize("name", SECRETS)
def test_a_secret_that_is_set_twice_or_whose_file_cannot_be_read_is_refused(tmp_path: Path, name: str) -> None:
    """By its name, and without what is in it."""
    file = tmp_path / "secret"
    file.write_text(SECRETS[name])
    with pytest.raises(ConfigurationError, match="both set") as caught:
        load({**BROKER, name: SECRETS[name], f"{name}_FILE": str(file)})
    assert SECRETS[name] not in caught.value.detail
    with pytest.raises(ConfigurationError, match=r"cannot read .*missing.*No such file"):
        load({**BROKER, f"{name}_FILE": str(tmp_path / "missing")})


def test_a_property_of_kafka_whose_name_ends_in_file_is_passed_on() -> None:
    """Librdkafka has such properties; only those of secrets are read here."""
    settings = load({**BROKER, "HALFWAY_KAFKA__SASL_OAUTHBEARER_ASSERTION_FILE": "/run/token"})
    assert settings.kafka_config("http://here").properties["sasl.oauthbearer.assertion.file"] == "/run/token"


def test_errors_about_a_settings_file_show_no_value_of_what_is_not_a_setting(tmp_path: Path) -> None:
    """It may be a secret whose name is misspelt, at the top or in a section."""
    file = tmp_path / "halfway.toml"
    for lines in ('master_secert = "open sesame"', '[policy]\nmaster_secret = "open sesame"', '[x]\ny = "open sesame"'):
        file.write_text(lines + "\n")
        with pytest.raises(ConfigurationError, match="not a setting of halfway") as caught:
            load(BROKER, file=file)
        assert "sesame" not in caught.value.detail
    file.write_text('master_secert = "open sesame"\n')
    with pytest.raises(ConfigurationError, match="did you mean HALFWAY_MASTER_SECRET"):
        load(BROKER, file=file)


def test_an_error_about_a_url_does_not_show_its_password() -> None:
    with pytest.raises(ConfigurationError, match="instance_url") as caught:
        load({**BROKER, "HALFWAY_INSTANCE_URL": "http://user:sesame@here:8080"})
    assert "sesame" not in caught.value.detail
    assert "here:8080" in caught.value.detail


@pytest.mark.parametrize(
    "given,told",
    [
        ({"HALFWAY_MASTER_SECRET": "m" * 32, "HALFWAY_OPERATOR_KEY": OPERATOR_KEY[:-1] + "!"}, "halfway keys generate"),
        (
            {"HALFWAY_MASTER_SECRET": "m" * 32, "HALFWAY_OPERATOR_KEY": key_text(PrincipalKind.GROUP, bytes(41))},
            "not an operator's key",
        ),
        ({"HALFWAY_OPERATOR_KEY": OPERATOR_KEY}, "without master_secret"),
        ({"HALFWAY_TLS_CERTIFICATE_FILE": __file__}, "belong together"),
        ({"HALFWAY_TLS_CLIENT_CA_FILE": __file__}, "require tls_certificate_file"),
        ({"HALFWAY_HEALTH_TLS": "true"}, "require tls_certificate_file"),
    ],
)
def test_what_would_guard_nothing_is_refused_and_no_secret_shown(given: dict[str, str], told: str) -> None:
    with pytest.raises(ConfigurationError, match=told) as caught:
        load({**BROKER, **given})
    assert OPERATOR_KEY[20:40] not in caught.value.detail


@pytest.mark.parametrize("name", ["MASTER_SECRET", "MASTER_SECRET_PREVIOUS", "OPERATOR_KEY", "CHECK_PROXY"])
def test_a_secret_that_is_wrong_is_named_with_the_file_it_is_in(tmp_path: Path, name: str) -> None:
    """By its own variable, and by the path that was read; nothing is named because the path contains its name."""
    file = tmp_path / "peer_credential"
    file.write_text("\n")
    with pytest.raises(ConfigurationError) as caught:
        load(
            {**GUARDED, f"HALFWAY_{name}": "sesame"}
            if name != "MASTER_SECRET"
            else {**BROKER, f"HALFWAY_{name}": "sesame"}
        )
    assert caught.value.detail.startswith(f"HALFWAY_{name}: {name.lower()} ")
    given = {variable: value for variable, value in GUARDED.items() if variable != f"HALFWAY_{name}"}
    with pytest.raises(ConfigurationError) as caught:
        load({**given, f"HALFWAY_{name}_FILE": str(file)})
    assert caught.value.detail.startswith(f"HALFWAY_{name}_FILE: {name.lower()}_file {str(file)!r} ")


def test_a_secret_of_the_settings_file_that_is_too_short_is_named_with_its_key_and_the_file(tmp_path: Path) -> None:
    file = tmp_path / "halfway.toml"
    file.write_text('master_secret = "sesame"\n')
    with pytest.raises(ConfigurationError) as caught:
        load(BROKER, file=file)
    assert caught.value.detail.startswith("HALFWAY_MASTER_SECRET: master_secret has 6 bytes")
    assert caught.value.detail.endswith(f"(master_secret in {str(file)!r})")
    assert "sesame" not in caught.value.detail


def test_all_that_is_wrong_in_the_environment_is_told_at_once(tmp_path: Path) -> None:
    """Unknown names, files that cannot be read, and values; and all that does not fit together."""
    missing = str(tmp_path / "missing")
    wrong = ("KAFKA__SASL_PASSWORD_FILE", "PEER_CREDENTIAL_FILE", "PROT", "SHARDS")
    with pytest.raises(ConfigurationError) as caught:
        load({**BROKER, **{f"HALFWAY_{name}": missing for name in wrong}})
    for name in wrong:
        assert f"HALFWAY_{name}" in caught.value.detail
    short = {"HALFWAY_MASTER_SECRET": "short", "HALFWAY_PEER_CREDENTIAL": "short", "HALFWAY_OPERATOR_KEY": "short"}
    with pytest.raises(ConfigurationError) as caught:
        load({**BROKER, **short})
    for name in short:
        assert f"{name}: " in caught.value.detail


def test_a_missing_secret_is_not_also_told_as_what_another_setting_needs(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError) as caught:
        load({"HALFWAY_OPERATOR_KEY": OPERATOR_KEY, "HALFWAY_MASTER_SECRET_FILE": str(tmp_path / "missing")})
    assert "has no effect" not in caught.value.detail


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
