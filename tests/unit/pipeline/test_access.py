"""One set of settings for the coordinator and the jobs, in the words of Kafka's Java client."""

from pathlib import Path

import click
import pytest

from halfway.app.settings import NOT_SETTINGS, VARIABLES, Settings
from halfway.pipeline.access import OPTIONS, Times, load, times
from halfway.pipeline.cli import pipeline
from halfway.pipeline.errors import PipelineError
from halfway.protocol.records import CheckPolicy

SERVERS = {"HALFWAY_KAFKA__BOOTSTRAP_SERVERS": "broker:9092"}
IDLE = {"connections.max.idle.ms": "120000"}
"""No firewall meets an idle connection of the jobs, unless the operator wants it."""


def test_the_coordinators_own_settings_are_enough() -> None:
    """Servers and prefix come from where the coordinator has them; what only tunes librdkafka is left out."""
    access = load({**SERVERS, "HALFWAY_KAFKA_PREFIX": "_mine.", "HALFWAY_KAFKA__LINGER_MS": "5"})
    assert access.java == {**IDLE, "bootstrap.servers": "broker:9092"}
    assert access.topic("op") == "_mine.op"


def test_the_environment_is_above_the_file(tmp_path: Path) -> None:
    """The same file and the same order as for the coordinator."""
    file = tmp_path / "halfway.toml"
    file.write_text('kafka_prefix = "_file."\n[kafka]\nbootstrap_servers = "file:1"\nsecurity_protocol = "ssl"\n')
    access = load({**SERVERS, "HALFWAY_CONFIG_FILE": str(file)})
    assert access.java == {**IDLE, "bootstrap.servers": "broker:9092", "security.protocol": "SSL"}
    assert access.prefix == "_file."


@pytest.mark.parametrize("name", ["SASL_MECHANISM", "SASL_MECHANISMS"])
def test_user_and_password_become_a_login(name: str) -> None:
    """What librdkafka has in two properties the Java client has in one, with quotes escaped."""
    access = load(
        {
            **SERVERS,
            "HALFWAY_KAFKA__SECURITY_PROTOCOL": "sasl_ssl",
            f"HALFWAY_KAFKA__{name}": "SCRAM-SHA-512",
            "HALFWAY_KAFKA__SASL_USERNAME": "me",
            "HALFWAY_KAFKA__SASL_PASSWORD": 'se"cr\\et',
        }
    )
    assert access.java["security.protocol"] == "SASL_SSL"
    assert access.java["sasl.mechanism"] == "SCRAM-SHA-512"
    assert access.java["sasl.jaas.config"] == (
        'org.apache.kafka.common.security.scram.ScramLoginModule required username="me" password="se\\"cr\\\\et";'
    )


def test_secrets_are_not_shown() -> None:
    """Nobody who prints how Kafka is reached prints a password."""
    secrets = {"HALFWAY_KAFKA__SASL_MECHANISM": "PLAIN", "HALFWAY_KAFKA__SASL_PASSWORD": "hush"}
    assert "hush" not in repr(load({**SERVERS, **secrets}))


def test_certificates_travel_as_text(tmp_path: Path) -> None:
    """Executors need no files: authority, certificate and key are read where the job is started."""
    for name, text in (("ca", "CA"), ("cert", "CERT"), ("key", "-----BEGIN PRIVATE KEY-----")):
        (tmp_path / f"{name}.pem").write_text(text)
    access = load(
        {
            **SERVERS,
            "HALFWAY_KAFKA__SSL_CA_LOCATION": str(tmp_path / "ca.pem"),
            "HALFWAY_KAFKA__SSL_CERTIFICATE_LOCATION": str(tmp_path / "cert.pem"),
            "HALFWAY_KAFKA__SSL_KEY_LOCATION": str(tmp_path / "key.pem"),
            "HALFWAY_KAFKA__SSL_ENDPOINT_IDENTIFICATION_ALGORITHM": "none",
        }
    )
    assert access.java == {
        **IDLE,
        "bootstrap.servers": "broker:9092",
        "ssl.endpoint.identification.algorithm": "",
        "ssl.truststore.type": "PEM",
        "ssl.truststore.certificates": "CA",
        "ssl.keystore.type": "PEM",
        "ssl.keystore.certificate.chain": "CERT",
        "ssl.keystore.key": "-----BEGIN PRIVATE KEY-----",
    }


@pytest.mark.parametrize(
    "name, value",
    [
        ("ENABLE_SSL_CERTIFICATE_VERIFICATION", "false"),
        ("SSL_PROVIDERS", "legacy"),
        ("SSL_CA_LOCATION", "/nowhere/ca.pem"),
    ],
)
def test_what_the_java_client_cannot_do_is_refused_by_name(name: str, value: str) -> None:
    """A security setting is never dropped in silence."""
    with pytest.raises(PipelineError, match=f"HALFWAY_KAFKA__{name}"):
        load({**SERVERS, f"HALFWAY_KAFKA__{name}": value})


def test_a_key_in_an_old_form_is_refused_with_the_remedy(tmp_path: Path) -> None:
    """The Java client reads PKCS #8 only."""
    (tmp_path / "key.pem").write_text("-----BEGIN RSA PRIVATE KEY-----")
    with pytest.raises(PipelineError, match="openssl pkcs8"):
        load({**SERVERS, "HALFWAY_KAFKA__SSL_KEY_LOCATION": str(tmp_path / "key.pem")})


def test_properties_of_the_java_client_can_be_given_as_they_are() -> None:
    """What has no translation has a way of its own, beside what librdkafka gets."""
    of_java = {"HALFWAY_PIPELINE_KAFKA__SSL_TRUSTSTORE_LOCATION": "/ca.jks"}
    access = load({**SERVERS, **of_java, "HALFWAY_KAFKA__SSL_PROVIDERS": "legacy"})
    assert access.java == {**IDLE, "bootstrap.servers": "broker:9092", "ssl.truststore.location": "/ca.jks"}
    assert access.librdkafka == {"bootstrap.servers": "broker:9092", "ssl.providers": "legacy"}


def test_without_servers_the_setting_is_named() -> None:
    """The one thing that everybody must set."""
    with pytest.raises(PipelineError, match="HALFWAY_KAFKA__BOOTSTRAP_SERVERS"):
        load({})


def test_the_coordinators_times_are_those_of_the_jobs(tmp_path: Path) -> None:
    """Its file, with the environment above it; what neither names is as for the coordinator."""
    file = tmp_path / "halfway.toml"
    file.write_text("outcome_horizon_s = 60\n[policy]\nfirst_check_after_s = 2.5\n")
    assert times({}, file=file) == Times(outcome_horizon_s=60, first_check_after_s=2.5)
    assert times({"HALFWAY_CONFIG_FILE": str(file), "HALFWAY_OUTCOME_HORIZON_S": "30"}) == Times(
        outcome_horizon_s=30, first_check_after_s=2.5
    )
    assert times({"HALFWAY_POLICY__FIRST_CHECK_AFTER_S": "9"}, file=file).first_check_after_s == 9
    assert times({}) == Times(
        outcome_horizon_s=Settings.model_fields["outcome_horizon_s"].default,
        first_check_after_s=CheckPolicy().first_check_after_s,
    )


@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf", "soon", "", "31536001"])
def test_what_is_no_time_is_refused_by_name(value: str) -> None:
    """With a horizon of nothing every use of an id would be a transaction of its own."""
    with pytest.raises(PipelineError, match="HALFWAY_OUTCOME_HORIZON_S"):
        times({"HALFWAY_OUTCOME_HORIZON_S": value})


@pytest.mark.parametrize(
    "variable, meant",
    [
        ("HALFWAY_KAFKA_PREFX", "HALFWAY_KAFKA_PREFIX"),
        ("HALFWAY_KAFKA_BOOTSTRAP_SERVERS", "HALFWAY_KAFKA__BOOTSTRAP_SERVERS"),
        ("HALFWAY_OUTCOME_HORIZN_S", "HALFWAY_OUTCOME_HORIZON_S"),
        ("HALFWAY_PIPELINE_MASTR", "HALFWAY_PIPELINE_MASTER"),
        ("HALFWAY_PIPELINE_NOTHING", "HALFWAY_PIPELINE_MEMORY"),
    ],
)
def test_a_misspelt_variable_is_refused_with_the_right_name(variable: str, meant: str) -> None:
    """An audit must not quietly judge another deployment."""
    for read in (load, times):
        with pytest.raises(PipelineError) as refused:
            read({**SERVERS, variable: "x"})
        assert variable in str(refused.value)
        assert meant in str(refused.value)


def test_a_misspelt_key_of_the_file_is_refused_with_the_right_name(tmp_path: Path) -> None:
    file = tmp_path / "halfway.toml"
    file.write_text("outcome_horizn_s = 900\n")
    with pytest.raises(PipelineError, match="outcome_horizn_s is no setting: did you mean outcome_horizon_s"):
        times(SERVERS, file=file)


def test_settings_that_only_the_coordinator_reads_are_ignored(tmp_path: Path) -> None:
    """Also if they stand in the environment and the file that the jobs share with it."""
    environment = {**SERVERS, **dict.fromkeys([*VARIABLES, *NOT_SETTINGS], "5")}
    file = tmp_path / "halfway.toml"
    file.write_text("".join(f"{name} = 5\n" for name in Settings.model_fields if name not in {"kafka", "policy"}))
    assert load(environment, file=file).prefix == "5"
    assert times(environment, file=file) == Times(outcome_horizon_s=5, first_check_after_s=5, max_age_s=5)


def test_every_variable_of_an_option_is_known() -> None:
    def variables(command: click.Command) -> set[str]:
        below = command.commands.values() if isinstance(command, click.Group) else ()
        own = {option.envvar for option in command.params if isinstance(option.envvar, str)}
        return own.union(*map(variables, below))

    assert variables(pipeline) == OPTIONS
