"""Settings that protect the interface: secrets, keys, certificates, and the refusal to serve everybody."""

from pathlib import Path

import pytest

from halfway.domain.errors import ConfigurationError
from halfway.domain.keys import RANDOM_BYTES, key_text
from halfway.domain.principal import PrincipalKind
from halfway.runtime.operator_key import first_operator_key
from halfway.runtime.serve.app import demand_guarded
from halfway.runtime.settings import load

BROKER = {"HALFWAY_KAFKA__BOOTSTRAP_SERVERS": "127.0.0.1:9092"}
GUARDED = {**BROKER, "HALFWAY_MASTER_SECRET": "m" * 32}
OPERATOR_KEY = key_text(PrincipalKind.OPERATOR, bytes(range(RANDOM_BYTES)))


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "", "10.1.2.3", "halfway.example"])  # noqa: S104
def test_nobody_but_this_machine_is_served_without_keys_unless_the_operator_says_so(host: str) -> None:
    with pytest.raises(ConfigurationError, match="HALFWAY_OPEN_ACCESS=true") as caught:
        demand_guarded(load({**BROKER, "HALFWAY_HOST": host}))
    assert "halfway keys generate" in caught.value.detail
    for remedy in ({"HALFWAY_MASTER_SECRET": "m" * 32}, {"HALFWAY_OPEN_ACCESS": "true"}, {"HALFWAY_HOST": "127.0.0.1"}):
        demand_guarded(load({**BROKER, "HALFWAY_HOST": host, **remedy}))


def test_a_master_secret_asks_for_keys_and_makes_the_peers_credential() -> None:
    settings = load({**GUARDED, "HALFWAY_MASTER_SECRET_PREVIOUS": "o" * 32})
    assert settings.access_control
    assert not load({**GUARDED, "HALFWAY_OPEN_ACCESS": "true"}).access_control
    shown, before = settings.peer_credentials
    assert load(GUARDED).peer_credentials == (shown,)
    chosen = load({**GUARDED, "HALFWAY_PEER_CREDENTIAL": "c" * 16}).peer_credentials
    assert chosen == ("c" * 16, shown)
    assert before not in chosen


def test_the_first_operators_key_can_stand_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "operator"
    file.write_text(OPERATOR_KEY + "\n")
    assert first_operator_key(load({**GUARDED, "HALFWAY_OPERATOR_KEY_FILE": str(file)})) == OPERATOR_KEY
    assert first_operator_key(load({**GUARDED, "HALFWAY_OPERATOR_KEY": OPERATOR_KEY})) == OPERATOR_KEY
    assert first_operator_key(load(GUARDED)) is None


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
