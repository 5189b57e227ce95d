from pathlib import Path

import pytest

from halfway.embedded import BrokerExitedError
from halfway.embedded.errors import BrokerLog


@pytest.fixture
def log(tmp_path: Path) -> BrokerLog:
    return BrokerLog(tmp_path / "broker.log")


def append(log: BrokerLog, *lines: str) -> None:
    with log.path.open("a", encoding="utf-8") as file:
        file.write("".join(f"{line}\n" for line in lines))


def info(count: int) -> list[str]:
    return [f"2026-01-01T00:00:00Z INFO  [main] line {number}" for number in range(count)]


def test_an_excerpt_shows_the_first_trouble_and_the_end(log: BrokerLog) -> None:
    append(
        log, *info(100), "2026-01-01T00:00:00Z ERROR [main] BrokerServer: no luck", "\tat Cause", *info(100), "the end"
    )
    excerpt = log.excerpt().splitlines()
    assert excerpt[0].endswith("no luck")
    assert excerpt[1] == "\tat Cause"
    assert excerpt[-1] == "the end"
    assert len(excerpt) < 30


@pytest.mark.parametrize(
    "trouble",
    [
        'Exception in thread "main" ConfigException: Invalid value',
        "Error occurred during initialization of VM",
        "Error: Could not create the Java Virtual Machine.",
        "# A fatal error has been detected by the Java Runtime Environment:",
    ],
)
def test_what_the_jvm_itself_says_is_trouble(log: BrokerLog, trouble: str) -> None:
    append(log, trouble, *info(100))
    assert log.excerpt().startswith(trouble)


def test_what_an_earlier_start_wrote_is_left_out(log: BrokerLog) -> None:
    append(log, "2026-01-01T00:00:00Z ERROR [main] of yesterday")
    log.mark()
    assert log.excerpt() == "(empty)"
    append(log, "today")
    assert log.excerpt() == "today"


def test_a_log_that_is_not_there_says_so(log: BrokerLog) -> None:
    log.mark()
    assert "not readable" in log.excerpt()


def test_the_error_of_a_broker_that_ended_has_the_log_and_its_path(log: BrokerLog) -> None:
    append(log, "out of luck")
    message = str(BrokerExitedError(-9, log))
    assert "killed by signal 9" in message
    assert str(log.path) in message
    assert "out of luck" in message
