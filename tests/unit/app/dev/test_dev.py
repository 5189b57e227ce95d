"""`halfway dev`: errors are reported before Kafka is started."""

import socket
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

import pytest
from click.testing import CliRunner, Result

import halfway.embedded
from halfway.app import dev as dev_module
from halfway.app.cli.main import halfway as command_line
from halfway.app.dev import DevOptions, _announce
from halfway.app.serve.app import Ready
from halfway.app.settings import load
from halfway.embedded.broker import pick_port


def test_lines_of_the_kafka_client_go_to_the_log(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Not to standard error, where they would stand between the lines of the log."""
    monkeypatch.setattr(dev_module, "_ADMIN_TIMEOUT_S", 0.5)
    with suppress(TimeoutError):
        dev_module._create("127.0.0.1:9", {"orders": 1})
    assert "rdkafka#" not in capfd.readouterr().err


@pytest.fixture(autouse=True)
def no_kafka(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail if Kafka is started."""

    def fail_start(*_: object) -> NoReturn:
        raise AssertionError("Kafka was started")

    monkeypatch.setattr(halfway.embedded.EmbeddedKafka, "start", fail_start)


@pytest.fixture
def used_port() -> Iterator[str]:
    """Provide a port that another server listens on."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        yield str(other.getsockname()[1])


def dev(*arguments: str, **settings: str) -> Result:
    result = CliRunner().invoke(command_line, ["dev", *arguments], env=settings)
    if not isinstance(result.exception, SystemExit):
        assert result.exception is not None
        raise result.exception
    return result


def free_ports() -> tuple[str, ...]:
    return "--port", str(pick_port()), "--health-port", "0"


WRONG = {
    "HALFWAY_SHARDS": "many",
    "HALFWAY_SHARD": "4",
    "HALFWAY_KAFKA_PREFIX": "a b/",
    "HALFWAY_KAFKA__ACKS": "1",
    "HALFWAY_KAFKA__NO_SUCH_THING": "1",
    "HALFWAY_CHECK_CA_FILE": str(Path(__file__)),
}


@pytest.mark.parametrize("variable", WRONG)
def test_a_wrong_setting_is_named_before_kafka_starts(variable: str) -> None:
    """Also those that only a part of the coordinator validates."""
    result = dev(*free_ports(), **{variable: WRONG[variable]})
    assert result.exit_code == 1
    named = {"HALFWAY_KAFKA_PREFIX": "prefix", "HALFWAY_KAFKA__NO_SUCH_THING": "no.such.thing"}
    assert named.get(variable, variable) in result.stderr


@pytest.mark.parametrize("option", ["--port", "--health-port"])
def test_a_taken_port_is_named_with_its_option_before_kafka_starts(option: str, used_port: str) -> None:
    """With the option, because it overrides HALFWAY_PORT here."""
    result = dev(*free_ports(), option, used_port)
    assert result.exit_code == 1
    assert (
        f"cannot listen on port {used_port} of 127.0.0.1 (it is taken by another process): choose another with {option}"
        in result.stderr
    )


@pytest.mark.parametrize("option", ["--port", "--health-port"])
def test_a_port_that_is_set_is_taken_unless_an_option_overrides_it(option: str, used_port: str) -> None:
    variable, free = f"HALFWAY{option.replace('-', '_').upper()[1:]}", str(pick_port())
    other = {"--port": "--health-port", "--health-port": "--port"}[option]
    result = dev(other, "0", **{variable: used_port})
    assert f"cannot listen on port {used_port} of 127.0.0.1" in result.stderr
    with pytest.raises(AssertionError, match="Kafka was started"):
        dev(other, "0", option, free, **{variable: used_port})


def test_the_port_for_checks_is_judged_only_if_it_is_needed(used_port: str) -> None:
    """Also before Kafka starts."""
    result = dev(*free_ports(), "--check-echo", "commit", "--check-port", used_port)
    assert result.exit_code == 1
    complaint = f"cannot listen on port {used_port} of 127.0.0.1 (it is taken by another process)"
    assert f"{complaint}: choose another with --check-port" in result.stderr
    with pytest.raises(AssertionError, match="Kafka was started"):
        dev(*free_ports(), "--check-port", used_port)


def test_one_port_given_twice_is_refused_before_kafka_starts() -> None:
    """Kafka would use it, and then the API could not."""
    port = str(pick_port())
    result = dev("--port", port, "--health-port", "0", "--kafka-port", port)
    assert result.exit_code == 1
    assert f"--port {port}" in result.stderr
    assert f"--kafka-port {port}" in result.stderr


@pytest.mark.parametrize("topic", ["a b", "..", "", ":3", "t:0", "t:1001", "t:x", "t:²", "t:" + "9" * 5_000, "t" * 250])
def test_a_topic_that_cannot_be_is_refused_before_kafka_starts(topic: str) -> None:
    """As an invalid option."""
    result = dev(*free_ports(), "--topic", topic)
    assert result.exit_code == 2
    assert "--topic" in result.stderr


def test_a_folder_that_cannot_be_made_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The cache of jars below a file: no traceback, and the setting to change."""
    monkeypatch.undo()
    file = tmp_path / "file"
    file.touch()
    result = dev(*free_ports(), XDG_CACHE_HOME=str(file / "cache"), JAVA_HOME=str(Path(sys.prefix)))
    assert result.exit_code == 1
    assert str(file / "cache" / "halfway") in result.stderr
    assert "XDG_CACHE_HOME" in result.stderr


@pytest.mark.parametrize("keys", [False, True])
def test_it_says_whether_everybody_may_do_everything(capsys: pytest.CaptureFixture[str], *, keys: bool) -> None:
    """It is open unless a master secret is set, and names the setting that requires keys."""
    settings = load({"HALFWAY_MASTER_SECRET": "long enough to be a master secret, of a test"} if keys else {})
    options = DevOptions(
        kafka_port=0,
        data_dir=None,
        keep=False,
        topics={},
        check_echo=None,
        check_port=0,
        as_json=False,
        with_parent=False,
    )
    _announce(options, settings, Ready(url="http://127.0.0.1:1", health_url="http://127.0.0.1:2"), "127.0.0.1:3", None)
    said = capsys.readouterr().out
    assert ("access   open" in said) == (not keys)
    assert ("HALFWAY_MASTER_SECRET" in said) == (not keys)
