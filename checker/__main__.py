"""Judge a history against a dump of the topics, or the topics themselves: exit status 1 if anything is wrong."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from checker.dump import read_topics
from checker.history import Run, read_history
from checker.judge import judge
from checker.records import read_records, write_records

SHOWN = 50


def main() -> int:
    """Judge a history."""
    parser = argparse.ArgumentParser(prog="python -m checker", description=__doc__)
    parser.add_argument("history", type=Path)
    parser.add_argument(
        "dump", type=Path, help="the topics' records; read from Kafka and written to this file if it does not exist"
    )
    parser.add_argument("--bootstrap-servers", help="where to read the topics")
    parser.add_argument("--prefix", default="_halfway.", help="of halfway's own topics (default _halfway.)")
    given = parser.parse_args()
    history = list(read_history(given.history))
    if not given.dump.exists():
        if given.bootstrap_servers is None:
            parser.error(f"there is no {given.dump}: --bootstrap-servers says where to read the topics")
        topics = next(event.topics for event in history if isinstance(event, Run))
        write_records(given.dump, read_topics(given.bootstrap_servers, prefix=given.prefix, topics=topics))
    verdict = judge(history, read_records(given.dump))
    for finding in verdict.findings[:SHOWN]:
        print(f"{finding.count} {finding.rule} {finding.id}: {'; '.join(finding.evidence)}", file=sys.stderr)
    print(json.dumps(verdict.summary()))
    return 0 if verdict.sound else 1


if __name__ == "__main__":
    sys.exit(main())
