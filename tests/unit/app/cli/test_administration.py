"""The commands that ask Kafka: the topics that a cluster needs, and events of the audit trail."""

import json
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import msgspec
import pytest
from click.testing import CliRunner, Result

from halfway.app.cli import administration as audit_log
from halfway.app.cli import administration as topics
from halfway.app.cli.main import halfway
from halfway.kafka.clients.config import KafkaConfig
from halfway.kafka.topics.admin_requests import AdminRequests
from halfway.protocol.errors import KafkaUnavailableError
from halfway.protocol.records import AuditEvent
from tests.support.records.samples import AUDIT_EVENT


def list_topics(**settings: str) -> Result:
    """Print the topics with a broker that does not answer."""
    environment = {"HALFWAY_KAFKA__BOOTSTRAP_SERVERS": "127.0.0.1:9", **settings}
    result = CliRunner().invoke(halfway, ["topics", "list"], env=environment)
    assert result.exit_code == 0, result.output
    return result


def replication(result: Result) -> set[str]:
    return {line.split()[2] for line in result.stdout.splitlines() if line.startswith("_halfway.")}


@pytest.mark.parametrize("brokers,replicas", [(1, "1"), (2, "1"), (3, "3"), (5, "3")])
def test_the_replication_is_that_of_the_cluster(monkeypatch: pytest.MonkeyPatch, brokers: int, replicas: str) -> None:
    """As `halfway topics create` makes the topics, and as `halfway topics verify` accepts them."""
    monkeypatch.setattr(AdminRequests, "brokers", lambda _: list(range(brokers)))
    listed = list_topics()
    assert replication(listed) == {replicas}
    assert ("min.insync.replicas=2" in listed.stdout) == (replicas == "3")
    assert listed.stderr == ""


def test_a_replication_that_is_set_is_shown_without_asking_kafka() -> None:
    listed = list_topics(HALFWAY_REPLICATION_FACTOR="2")
    assert replication(listed) == {"2"}
    assert listed.stderr == ""


def test_a_cluster_that_does_not_answer_is_taken_for_one_of_three_brokers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The output says so: the command also serves to create the topics before anything else works."""
    monkeypatch.setattr(topics, "ANSWER_S", 0.5)
    listed = list_topics()
    assert replication(listed) == {"3"}
    assert "this shows what a cluster of 3 brokers needs" in listed.stderr


NO_AUTHORITY = {"HALFWAY_KAFKA__SECURITY_PROTOCOL": "SSL", "HALFWAY_KAFKA__SSL_CA_LOCATION": "no"}


@pytest.mark.parametrize(
    "settings, named",
    [
        ({"HALFWAY_SHARDS": "many"}, "HALFWAY_SHARDS"),
        ({}, "HALFWAY_KAFKA__BOOTSTRAP_SERVERS"),
        (NO_AUTHORITY | {"HALFWAY_KAFKA__BOOTSTRAP_SERVERS": "127.0.0.1:9"}, "HALFWAY_KAFKA__SSL_CA_LOCATION"),
    ],
    ids=["no number", "no broker", "no authority"],
)
def test_the_doctor_finds_settings_with_which_no_start_can_begin(
    settings: dict[str, str], named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As findings: with --json a pipeline gets JSON."""
    monkeypatch.setattr("halfway.app.cli.doctor.configure", lambda **_: None)  # it would silence this process
    result = CliRunner().invoke(halfway, ["doctor", "--json"], env={"HALFWAY_HOST": "127.0.0.1", **settings})
    assert result.exit_code == 1
    (wrong,) = (one["detail"] for one in json.loads(result.stdout) if one["result"] == "wrong")
    assert named in wrong


NOW_MS = 1_767_323_045_678
AT = "2026-01-02T03:04:05.678Z"
EVENTS = [
    msgspec.structs.replace(AUDIT_EVENT, at=NOW_MS, id=number, actor_kind=kind, actor=actor, group=group, key_id=None)
    for number, kind, actor, group in (
        ("e1", "operator", "anna", "shop"),
        ("e2", "operator", "anna", None),
        ("e3", "group", "shop", "shop"),
        ("e4", "operator", "ben", "other"),
    )
]


class Trail:
    """The topic of the audit trail, as read by the command."""

    def __init__(self) -> None:
        self.events: list[AuditEvent] = EVENTS
        self.error: KafkaUnavailableError | None = None
        self.since_ms: list[int] = []

    def __call__(self, _config: KafkaConfig, *, since_ms: int) -> Iterator[AuditEvent]:
        self.since_ms.append(since_ms)
        yield from self.events
        if self.error is not None:
            raise self.error


@pytest.fixture
def trail(monkeypatch: pytest.MonkeyPatch) -> Trail:
    trail = Trail()
    monkeypatch.setattr(audit_log, "read_events", trail)
    monkeypatch.setattr(audit_log, "time", SimpleNamespace(time=lambda: NOW_MS / 1000))
    return trail


@pytest.fixture
def ask(trail: Trail) -> Callable[..., Result]:
    """Return a function that runs the command with these options."""
    del trail
    environment = {"HALFWAY_KAFKA__BOOTSTRAP_SERVERS": "127.0.0.1:1"}
    return lambda *options: CliRunner().invoke(halfway, ["audit-log", *options], env=environment)


def ids(result: Result) -> list[str]:
    assert result.exit_code == 0, result.output
    return [json.loads(line)["id"] for line in result.stdout.splitlines()]


@pytest.mark.parametrize(
    "options, shown",
    [
        ([], ["e1", "e2", "e3", "e4"]),
        (["--group", "shop"], ["e1", "e3"]),
        (["--actor", "anna"], ["e1", "e2"]),
        (["--actor", "shop"], ["e3"]),
        (["--actor", "anna", "--group", "shop"], ["e1"]),
        (["--actor", "ann"], []),
    ],
)
def test_events_are_chosen_by_group_and_by_actor(
    ask: Callable[..., Result], options: list[str], shown: list[str]
) -> None:
    """By whole names; an event without a group matches no group."""
    assert ids(ask("--json", *options)) == shown


@pytest.mark.parametrize(
    "options, back_ms", [([], 86_400_000), (["--since-s", "1.5"], 1_500), (["--since-s", "1e12"], NOW_MS)]
)
def test_it_looks_back_a_day_or_as_far_as_it_is_told(
    ask: Callable[..., Result], trail: Trail, options: list[str], back_ms: int
) -> None:
    """Not beyond 1970: negative times have another meaning in Kafka."""
    assert ask(*options).exit_code == 0
    assert trail.since_ms == [NOW_MS - back_ms]


def test_a_time_that_has_not_come_is_refused(ask: Callable[..., Result], trail: Trail) -> None:
    refused = ask("--since-s", "-1")
    assert refused.exit_code == 2
    assert "--since-s" in refused.stderr
    assert trail.since_ms == []


def test_the_table_has_a_line_for_each_event_which_no_text_in_it_breaks(
    ask: Callable[..., Result], trail: Trail
) -> None:
    """The actor is shown with its kind; an unknown value is a dash."""
    changed = msgspec.structs.replace
    done = {"key_id": "AbCdEf123456", "detail": "commit", "remark": "looked at\n\x1b[31mit", "result": "done"}
    none = {"actor_kind": "anybody", "actor": "", "detail": None, "remark": None, "result": "unknown_transaction"}
    trail.events = [
        changed(EVENTS[0], action="end_by_hand", subject="o-42", **done),
        changed(EVENTS[1], action="resume", subject="o-43", **none),
    ]
    header, first, second = ask().stdout.splitlines()
    assert header.split() == list(audit_log.COLUMNS)
    words = [AT, "operator", "anna", "AbCdEf123456", "end_by_hand", "o-42", "shop", "done", "commit"]
    assert first.split() == [*words, "looked", r"at\n\x1b[31mit"]
    assert second.split() == [AT, "anybody", "-", "resume", "o-43", "-", "unknown_transaction", "-", "-"]


def test_a_trail_that_cannot_be_read_ends_the_command_with_the_reason(ask: Callable[..., Result], trail: Trail) -> None:
    trail.error = KafkaUnavailableError("_halfway.audit could not be read: timed out")
    failed = ask()
    assert failed.exit_code == 1
    assert failed.stderr == "halfway: _halfway.audit could not be read: timed out\n"
    assert failed.stdout == ""
