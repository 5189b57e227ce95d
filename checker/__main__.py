"""Judge a history against a dump of the topics, or the topics themselves. The exit status is 1 if anything is wrong."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from checker.dump import read_topics
from checker.history import Run, read_history
from checker.judge import judge
from checker.records import read_records, write_records

MAX_SHOWN = 50


def main() -> int:
    """Judge a history."""
    parser = argparse.ArgumentParser(prog="python -m checker", description=__doc__)
    parser.add_argument("history", type=Path)
    parser.add_argument(
        "dump",
        type=Path,
        help="the records of the topics; if the file does not exist, they are read from Kafka and written to it",
    )
    parser.add_argument("--bootstrap-servers", help="the Kafka cluster of the topics")
    parser.add_argument("--prefix", default="_halfway.", help="the prefix of halfway's own topics (default _halfway.)")
    options = parser.parse_args()
    history = list(read_history(options.history))
    if not options.dump.exists():
        if options.bootstrap_servers is None:
            parser.error(f"{options.dump} does not exist: give --bootstrap-servers to read the topics")
        topics = next(event.topics for event in history if isinstance(event, Run))
        write_records(options.dump, read_topics(options.bootstrap_servers, prefix=options.prefix, topics=topics))
    verdict = judge(history, read_records(options.dump))
    for finding in verdict.findings[:MAX_SHOWN]:
        print(f"{finding.count} {finding.rule} {finding.id}: {'; '.join(finding.evidence)}", file=sys.stderr)
    print(json.dumps(verdict.summary()))
    return 0 if verdict.sound else 1


if __name__ == "__main__":
    sys.exit(main())
