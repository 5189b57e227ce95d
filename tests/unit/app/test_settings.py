"""Settings: one typed model from environment and file; an error names the setting, its value and a remedy."""

from ipaddress import ip_network
from pathlib import Path

import pytest

from halfway.app.settings import load
from halfway.protocol.errors import ConfigurationError
from halfway.protocol.records import LimitOverrides, OnExhausted

LISTED = ip_network("10.0.0.0/8")
BOOTSTRAP = {"HALFWAY_KAFKA__BOOTSTRAP_SERVERS": "127.0.0.1:9092"}


def test_environment_reaches_every_part() -> None:
    """Kafka properties, limits, the nested policy and ports reach the parts that use them."""
    settings = load(
        BOOTSTRAP
        | {
            "HALFWAY_KAFKA__SASL_PASSWORD": "open sesame",
            "HALFWAY_KAFKA_PREFIX": "_other.",
            "HALFWAY_SHARDS": "4",
            "HALFWAY_POLICY__MAX_CHECKS": "3",
            "HALFWAY_POLICY__ON_EXHAUSTED": "rollback",
            "HALFWAY_LEASE_S": "7",
            "HALFWAY_OUTCOME_HORIZON_S": "60",
        }
    )
    config, limits = settings.kafka_config("http://here"), settings.service_limits()
    assert config.properties == {"bootstrap.servers": "127.0.0.1:9092", "sasl.password": "open sesame"}
    assert (config.prefix, config.shards, config.outcome_horizon_s) == ("_other.", 4, 60)
    assert (limits.shards, limits.outcome_horizon_s, limits.lease_s) == (4, 60, 7)
    assert limits.default_policy.max_checks == 3
    assert limits.default_policy.on_exhausted is OnExhausted.ROLLBACK


def test_more_shards_than_new_topics_get_are_accepted() -> None:
    """Existing topics with more shards can be used only with their own number; the creation of topics refuses it."""
    environment = {"HALFWAY_SHARDS": "1024", "HALFWAY_KAFKA__BOOTSTRAP_SERVERS": "127.0.0.1:9092"}
    assert load(environment).kafka_config("http://here").shards == 1024


def test_lists_come_from_one_variable_between_commas() -> None:
    """Hosts and networks of check endpoints; empty means no limit."""
    settings = load({"HALFWAY_CHECK_HOSTS": "orders, *.shop.svc,", "HALFWAY_CHECK_NETWORKS": "10.0.0.0/8,fd00::/8"})
    assert settings.check_hosts == ("orders", "*.shop.svc")
    assert [str(one) for one in settings.check_networks] == ["10.0.0.0/8", "fd00::/8"]
    assert load({}).check_hosts == load({}).check_networks == ()


def test_the_environment_stands_above_the_file(tmp_path: Path) -> None:
    """A TOML file gives what the environment does not."""
    file = tmp_path / "halfway.toml"
    lines = (
        "shards = 3",
        "port = 9000",
        "[kafka]",
        '"bootstrap.servers" = "file:9092"',
        "enable_ssl_certificate_verification = true",
        "[policy]",
        "max_checks = 9",
        "max_age_s = 100",
    )
    file.write_text("\n".join(lines))
    settings = load({"HALFWAY_PORT": "9001", "HALFWAY_CONFIG_FILE": str(file), "HALFWAY_POLICY__MAX_CHECKS": "8"})
    assert (settings.shards, settings.port) == (3, 9001)
    assert (settings.policy.max_checks, settings.policy.max_age_s) == (8, 100)
    assert settings.kafka_config("").properties["enable.ssl.certificate.verification"] == "true"


@pytest.mark.parametrize(
    "variable,value",
    [
        ("HALFWAY_PORT", "70000"),
        ("HALFWAY_REPLICATION_FACTOR", "0"),
        ("HALFWAY_SESSION_TIMEOUT_S", "301"),
        ("HALFWAY_CHECK_TIMEOUT_S", "-1"),
        ("HALFWAY_CHECK_TIMEOUT_S", "nan"),
        ("HALFWAY_POLICY__ON_EXHAUSTED", "explode"),
        ("HALFWAY_CHECK_NETWORKS", "10.0.0.1/8"),
        ("HALFWAY_CHECK_HOSTS", "http://orders/"),
        ("HALFWAY_CHECK_CA_FILE", "nowhere.pem"),
    ],
)
def test_a_wrong_value_is_named(variable: str, value: str) -> None:
    """The message contains the variable and its value."""
    with pytest.raises(ConfigurationError) as raised:
        load(BOOTSTRAP | {variable: value})
    assert variable in raised.value.detail
    assert repr(value) in raised.value.detail


@pytest.mark.parametrize(
    "variable,value,remedy",
    [
        ("HALFWAY_PORT", "eighty", "it must be a whole number"),
        ("HALFWAY_CHECK_TIMEOUT_S", "soon", "it must be a number"),
        ("HALFWAY_OPEN_ACCESS", "perhaps", "it must be true, false or metrics"),
        ("HALFWAY_SHARDS", "0", "it must be greater than or equal to 1"),
        ("HALFWAY_LOG_LEVEL", "loud", "it must be 'debug', 'info', 'warning' or 'error'"),
    ],
)
def test_a_wrong_value_is_explained(variable: str, value: str, remedy: str) -> None:
    with pytest.raises(ConfigurationError) as raised:
        load(BOOTSTRAP | {variable: value})
    assert raised.value.detail == f"{variable} is {value!r}: {remedy}"


@pytest.mark.parametrize(
    "given,variables",
    [
        ({"MASTER_SECRET": "short"}, "HALFWAY_MASTER_SECRET"),
        ({"MASTER_SECRET": "n" * 32, "OPERATOR_KEY": "nonsense"}, "HALFWAY_OPERATOR_KEY"),
        ({"INSTANCE_URL": "ftp://a"}, "HALFWAY_INSTANCE_URL"),
        ({"PORT": "8081"}, "HALFWAY_HEALTH_PORT"),
        ({"KAFKA_PREFIX": "a b"}, "HALFWAY_KAFKA_PREFIX"),
        ({"OUTCOME_HORIZON_S": "604800"}, "HALFWAY_OP_RETENTION_MS, HALFWAY_OUTCOME_HORIZON_S"),
        ({"POLICY__MAX_AGE_S": "604800"}, "HALFWAY_POLICY__MAX_AGE_S, HALFWAY_OP_RETENTION_MS"),
    ],
)
def test_settings_that_do_not_fit_are_named_as_variables(given: dict[str, str], variables: str) -> None:
    with pytest.raises(ConfigurationError) as raised:
        load(BOOTSTRAP | {f"HALFWAY_{name}": value for name, value in given.items()}).kafka_config("")
    assert raised.value.detail.startswith(f"{variables}: ")


@pytest.mark.parametrize("name", ["PROT", "HEALT_PORT", "PORTS", "POLICY__MAX_CHEKS", "PORT__X", "KAFKA"])
def test_an_unknown_variable_is_named(name: str) -> None:
    """A misspelt setting is not ignored."""
    with pytest.raises(ConfigurationError, match=f"HALFWAY_{name}"):
        load(BOOTSTRAP | {f"HALFWAY_{name}": "1"})


def test_a_setting_of_an_earlier_release_is_ignored_and_known(tmp_path: Path) -> None:
    """An upgrade must not fail for a limit that is fixed now; the log of the start says what holds in its place."""
    (file := tmp_path / "halfway.toml").write_text("lane_queue = 5\n")
    settings = load(BOOTSTRAP | {"HALFWAY_MAX_BODY_BYTES": "9"}, file=file)
    assert settings.removed == {
        "HALFWAY_MAX_BODY_BYTES": "twice HALFWAY_MAX_PREPARE_BYTES",
        "HALFWAY_LANE_QUEUE": "10,000",
    }


@pytest.mark.parametrize(
    "given, name, value",
    [
        *(({"CHECK_PRIVATE_NETWORKS": no}, "check_networks", ("public",)) for no in ("false", "off", "N", "0")),
        ({"CHECK_PRIVATE_NETWORKS": "false", "CHECK_NETWORKS": ""}, "check_networks", ("public",)),
        ({"CHECK_PRIVATE_NETWORKS": "true"}, "check_networks", ()),
        ({"CHECK_PRIVATE_NETWORKS": "false", "CHECK_NETWORKS": str(LISTED)}, "check_networks", (LISTED,)),
        ({"OPEN_METRICS": "on"}, "open_access", "metrics"),
        ({"OPEN_METRICS": "true", "OPEN_ACCESS": "false"}, "open_access", "metrics"),
        ({"OPEN_METRICS": "true", "OPEN_ACCESS": "true"}, "open_access", True),
        ({"OPEN_METRICS": "false", "OPEN_ACCESS": "true"}, "open_access", True),
        ({"GROUP_MAX_PENDING": "7"}, "limits", LimitOverrides(pending=7)),
        ({"GROUP_MAX_PENDING": "7", "LIMITS__PENDING": "8"}, "limits", LimitOverrides(pending=8)),
        (
            {"GROUP_BYTES_IN_FLIGHT": "9", "LIMITS__PREPARES_PER_S": "0.5"},
            "limits",
            LimitOverrides(bytes_in_flight=9, prepares_per_s=0.5),
        ),
    ],
)
def test_a_setting_that_another_one_has_taken_over_holds_as_before(
    given: dict[str, str], name: str, value: object
) -> None:
    """An upgrade opens nothing that was closed, and closes nothing that was open."""
    settings = load(BOOTSTRAP | {f"HALFWAY_{key}": text for key, text in given.items()})
    assert getattr(settings, name) == value
    assert settings.removed


@pytest.mark.parametrize("name", ["HALFWAY_CHECK_PRIVATE_NETWORKS", "HALFWAY_OPEN_METRICS"])
def test_a_wrong_value_of_a_setting_that_was_taken_over_ends_the_start(name: str) -> None:
    with pytest.raises(ConfigurationError, match="must be true or false"):
        load(BOOTSTRAP | {name: "perhaps"})


@pytest.mark.parametrize("name", ["HALFWAY_LIMITS__PENDING", "HALFWAY_GROUP_MAX_PENDING"])
def test_a_wrong_default_limit_is_named(name: str) -> None:
    with pytest.raises(ConfigurationError, match=r"HALFWAY_LIMITS__PENDING( is '0')?: it must be greater than"):
        load(BOOTSTRAP | {name: "0"})


def test_settings_of_the_spark_jobs_may_stand_in_the_same_environment() -> None:
    """One environment file can serve the coordinator and the jobs."""
    load(BOOTSTRAP | {"HALFWAY_PIPELINE_CONNECTOR_VERSION": "4.0.0", "HALFWAY_PIPELINE_KAFKA__CLIENT_ID": "jobs"})
    load(BOOTSTRAP | {"HALFWAY_CLIENT_KEY": "of a service beside it"})
    load(BOOTSTRAP | {"HALFWAY_KEY": "of a service that was copied from examples/services"})


@pytest.mark.parametrize("text", ["port = ", "\x00", "port = 1\nport = 2\n", "shards = " + "[" * 5_000])
def test_a_file_that_is_not_toml_is_named(tmp_path: Path, text: str) -> None:
    """The message says which file."""
    file = tmp_path / "halfway.toml"
    file.write_text(text)
    with pytest.raises(ConfigurationError, match=r"halfway\.toml.*is not TOML"):
        load(BOOTSTRAP, file=file)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    """The message says which file, and why."""
    with pytest.raises(ConfigurationError, match=r"nowhere\.toml.*No such file"):
        load(BOOTSTRAP, file=tmp_path / "nowhere.toml")


@pytest.mark.parametrize(
    "over,match",
    [
        ({"HALFWAY_POLICY__MAX_AGE_S": "604800"}, "max_age_s"),
        ({"HALFWAY_POLICY__MAX_INTERVAL_S": "1"}, "check_interval_s"),
        ({"HALFWAY_POLICY__MAX_AGE_S": "5"}, "first_check_after_s"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(over: dict[str, str], match: str) -> None:
    """A policy that is longer than op's retention, or whose times do not fit together."""
    with pytest.raises(ConfigurationError, match=match):
        load(BOOTSTRAP | over)


@pytest.mark.parametrize("credential", ["short", "x" * 600, "ein Schlüssel mit Umlaut"])
def test_a_credential_that_is_weak_or_fits_no_header_is_refused_and_not_shown(credential: str) -> None:
    with pytest.raises(ConfigurationError, match="peer_credential") as caught:
        load(BOOTSTRAP | {"HALFWAY_PEER_CREDENTIAL": credential})
    assert credential not in caught.value.detail
    assert "openssl rand" in caught.value.detail


def test_a_credential_between_instances_can_be_changed_while_they_run() -> None:
    """The first is shown; the second is accepted too, before the change and after it."""
    settings = load(BOOTSTRAP | {"HALFWAY_PEER_CREDENTIAL": "the-new-long-enough the-old-long-enough"})
    assert settings.peer_credentials == ("the-new-long-enough", "the-old-long-enough")
    assert "long-enough" not in repr(settings)
    phrase = BOOTSTRAP | {"HALFWAY_PEER_CREDENTIAL": "one phrase of short words"}
    assert load(phrase).peer_credentials == ("one phrase of short words",)
    assert load(BOOTSTRAP).peer_credentials == ()


@pytest.mark.parametrize(
    "url", ["ftp://here", "here:8080", "http://", "http://a:b@here", "http://here/?x=1", "http://[", "http://here/#x"]
)
def test_an_instance_url_that_others_could_not_ask_is_refused(url: str) -> None:
    with pytest.raises(ConfigurationError, match="instance_url"):
        load(BOOTSTRAP | {"HALFWAY_INSTANCE_URL": url})


@pytest.mark.parametrize(
    "written,meant",
    [
        ("HALFWAY_KAFKA_BOOTSTRAP_SERVERS", "HALFWAY_KAFKA__BOOTSTRAP_SERVERS"),
        ("HALFWAY_KAFKA_SASL_PASSWORD", "HALFWAY_KAFKA__SASL_PASSWORD"),
        ("HALFWAY_KAFKA__SASL__PASSWORD", "HALFWAY_KAFKA__SASL_PASSWORD"),
        ("HALFWAY_KAFKA_PREFX", "HALFWAY_KAFKA_PREFIX"),
        ("HALFWAY_SHARD", "HALFWAY_SHARDS"),
        ("HALFWAY_POLICY_MAX_CHECKS", "HALFWAY_POLICY__MAX_CHECKS"),
        ("HALFWAY_POLICY__MAX_CHECK", "HALFWAY_POLICY__MAX_CHECKS"),
        ("HALFWAY_TOKENS", "HALFWAY_TOKEN"),
        ("HALFWAY_COLOUR_OF_THE_SKY", None),
    ],
)
def test_a_misspelt_setting_is_answered_with_the_nearest_right_one(written: str, meant: str | None) -> None:
    """If there is a similar one; never with its value."""
    with pytest.raises(ConfigurationError) as refused:
        load(BOOTSTRAP | {written: "open sesame"})
    assert written in refused.value.detail
    assert (f"did you mean {meant}?" in refused.value.detail) == (meant is not None)
    assert ("did you mean" in refused.value.detail) == (meant is not None)
    assert "sesame" not in refused.value.detail


def test_a_wrong_setting_of_the_file_is_named_with_the_file_and_its_key(tmp_path: Path) -> None:
    """Unless the environment overrides it."""
    file = tmp_path / "halfway.toml"
    file.write_text("max_pendng = 5\nport = 8080\n[policy]\nmax_checks = 'x'\n[polcy]\n")
    with pytest.raises(ConfigurationError) as refused:
        load(BOOTSTRAP | {"HALFWAY_PORT": "x"}, file=file)
    assert f"(max_pendng in {str(file)!r}, did you mean max_pending?)" in refused.value.detail
    assert f"(polcy in {str(file)!r}, did you mean policy?)" in refused.value.detail
    assert f"it must be a whole number (policy.max_checks in {str(file)!r})" in refused.value.detail
    assert "HALFWAY_PORT is 'x': it must be a whole number;" in f"{refused.value.detail};"


@pytest.mark.parametrize("key", ["bootstrap.servers", '"bootstrap.servers"', "bootstrap_servers"])
def test_a_kafka_property_in_the_file_may_have_dots_or_underscores(tmp_path: Path, key: str) -> None:
    """TOML reads a name with dots as nested tables."""
    file = tmp_path / "halfway.toml"
    file.write_text(f'[kafka]\n{key} = "here:9092"\nsecurity.protocol = "ssl"\n')
    properties = load({}, file=file).kafka_config("").properties
    assert properties == {"bootstrap.servers": "here:9092", "security.protocol": "ssl"}


@pytest.mark.parametrize("value", ["open\udcffsesame", "open\0sesame"])
@pytest.mark.parametrize("variable", ["HALFWAY_KAFKA__SASL_PASSWORD", "HALFWAY_KAFKA__A\udcffB"])
def test_a_kafka_property_that_is_no_text_is_named_and_not_shown(variable: str, value: str) -> None:
    """For example a password in Latin-1, with which the Kafka client would crash the process."""
    with pytest.raises(ConfigurationError, match="UTF-8") as refused:
        load(BOOTSTRAP | {variable: value}).kafka_config("")
    assert ascii(variable.removeprefix("HALFWAY_KAFKA__"))[1:-1] in refused.value.detail
    assert "sesame" not in refused.value.detail


def test_a_proxy_is_named_by_a_url_and_its_password_is_told_to_nobody() -> None:
    load({"HALFWAY_CHECK_PROXY": "http://user:hunter2hunter2@proxy:3128"})
    for wrong in (
        "proxy:3128",
        "socks5://user:hunter2hunter2@proxy",
        "http://user:hunter2hunter2@proxy/?x",
        "http://[",
    ):
        with pytest.raises(ConfigurationError, match="check_proxy") as caught:
            load({"HALFWAY_CHECK_PROXY": wrong})
        assert "hunter2" not in caught.value.detail


def test_a_secret_of_the_wrong_type_is_not_told(tmp_path: Path) -> None:
    file = tmp_path / "halfway.toml"
    file.write_text("master_secret = 4711471147114711\npeer_credential = [4711471147114711]\n")
    with pytest.raises(ConfigurationError, match="HALFWAY_MASTER_SECRET") as caught:
        load({}, file=file)
    assert "4711" not in caught.value.detail


OF_KUBERNETES = {
    "HALFWAY_SERVICE_HOST": "10.96.12.7",
    "HALFWAY_SERVICE_PORT": "8080",
    "HALFWAY_SERVICE_PORT_API": "8080",
    "HALFWAY_SERVICE_PORT_HEALTH_CHECK": "8081",
    "HALFWAY_PORT": "tcp://10.96.12.7:8080",
    "HALFWAY_PORT_8080_TCP": "tcp://10.96.12.7:8080",
    "HALFWAY_PORT_8080_TCP_PROTO": "tcp",
    "HALFWAY_PORT_8080_TCP_PORT": "8080",
    "HALFWAY_PORT_8080_TCP_ADDR": "10.96.12.7",
    "HALFWAY_HEALTH_SERVICE_HOST": "10.96.12.8",
    "HALFWAY_HEALTH_PORT": "tcp://10.96.12.8:8081",
    "HALFWAY_HEALTH_PORT_8081_TCP_ADDR": "10.96.12.8",
    "HALFWAY_KAFKA_PORT": "tcp://10.96.12.9:9092",
}
"""What each pod of a namespace gets for its Services `halfway`, `halfway-health` and `halfway-kafka`."""


def test_what_kubernetes_sets_for_services_of_our_name_is_no_setting() -> None:
    assert load({**BOOTSTRAP, **OF_KUBERNETES}) == load(BOOTSTRAP)


def test_ports_that_are_set_in_spite_of_such_services_count() -> None:
    settings = load({**BOOTSTRAP, **OF_KUBERNETES, "HALFWAY_PORT": "9000", "HALFWAY_HEALTH_PORT": "9001"})
    assert (settings.port, settings.health_port) == (9000, 9001)
