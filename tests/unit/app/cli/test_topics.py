"""`halfway topics list` prints what the cluster needs, as far as Kafka answers."""

import pytest
from click.testing import CliRunner, Result

from halfway.app.cli import administration as topics
from halfway.app.cli.main import halfway
from halfway.kafka.topics.admin_requests import AdminRequests


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
