"""Judge a history against a dump of the topics, or the topics themselves.

The exit status is 0 if nothing is wrong, 1 if something is, and 2 if the run cannot be judged.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
from confluent_kafka import KafkaException

from checker.dump import read_topics
from checker.history import AnyEvent, Run, read_history
from checker.judge import Verdict, judge
from checker.records import read_records, write_records

MAX_SHOWN = 50


class CannotJudgeError(Exception):
    """The two files are not enough for a verdict."""


_UNUSABLE = (CannotJudgeError, OSError, msgspec.DecodeError, KafkaException)
"""Also errors of a file that cannot be read, of a line that is not an event or a record, and of Kafka."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Judge a history, and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m checker", description=__doc__)
    parser.add_argument("history", type=Path)
    parser.add_argument(
        "dump",
        type=Path,
        help="the records of the topics; if the file does not exist, they are read from Kafka and written to it",
    )
    parser.add_argument("--bootstrap-servers", help="the Kafka cluster of the topics")
    parser.add_argument("--prefix", default="_halfway.", help="the prefix of halfway's own topics (default _halfway.)")
    options = parser.parse_args(arguments)
    try:
        verdict = _judge(options)
    except _UNUSABLE as error:
        print(f"cannot judge: {error}", file=sys.stderr)
        return 2
    for finding in verdict.findings[:MAX_SHOWN]:
        print(f"{finding.count} {finding.rule} {finding.id}: {'; '.join(finding.evidence)}", file=sys.stderr)
    if not verdict.complete:
        print("cannot judge: the history does not begin with `run` and end with `rest`", file=sys.stderr)
    print(json.dumps(verdict.summary()))
    if not verdict.complete:
        return 2
    return 0 if verdict.sound else 1


def _judge(options: argparse.Namespace) -> Verdict:
    history = list(read_history(options.history))
    if not options.dump.exists():
        _write_dump(options, history)
    return judge(history, read_records(options.dump))


def _write_dump(options: argparse.Namespace, history: Sequence[AnyEvent]) -> None:
    if options.bootstrap_servers is None:
        raise CannotJudgeError(f"{options.dump} does not exist: give --bootstrap-servers to read the topics")
    topics = next((event.topics for event in history if isinstance(event, Run)), None)
    if topics is None:
        raise CannotJudgeError(f"{options.history} has no `run`, which names the topics to read")
    try:
        write_records(options.dump, read_topics(options.bootstrap_servers, prefix=options.prefix, topics=topics))
    except BaseException:
        options.dump.unlink(missing_ok=True)  # the next run would take a part of the records for all of them
        raise


if __name__ == "__main__":
    sys.exit(main())
