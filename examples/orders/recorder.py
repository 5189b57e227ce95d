"""Writes down what passes between the order service and halfway, for the checker (docs/checker.md)."""

from collections import defaultdict
from collections.abc import Collection, Mapping
from itertools import count
from pathlib import Path
from typing import Any

from checker.content import content_of
from checker.dump import read_topics
from checker.history import Checked, End, Ended, HistoryWriter, Prepare, Prepared, Rest, Run, read_history
from checker.judge import judge
from examples.orders.judge import Problem
from examples.orders.service import POLICIES, TOPICS, VERDICTS

Json = Mapping[str, Any]


class Recorder:
    """The history of one run of the demo."""

    def __init__(self, path: Path, seed: int) -> None:
        """Begin the history; `path` must not exist."""
        self._path = path
        self._history = HistoryWriter(path)
        self._numbers = count()
        rolls_back = tuple(group for group, policy in POLICIES.items() if policy["on_exhausted"] == "rollback")
        self._history.write(Run(seed=seed, topics=TOPICS, policy_rolls_back=rolls_back))

    def asked(self, step: str, item: Json) -> tuple[str, int]:
        """Note a prepare or an end before halfway gets it; what is returned goes into `answered`."""
        order = item["id"]
        ref = f"{order}/{next(self._numbers)}"
        if step == "prepare":
            contents = tuple(
                content_of(message["topic"], message["key"].encode(), message["value"].encode())
                for message in item["messages"]
            )
            self._history.write(Prepare(ref=ref, group=item["group"], contents=contents, id=order))
        else:
            self._history.write(End(id=order, outcome=item["outcome"]))
        return ref, self._history.now()

    def answered(self, step: str, item: Json, asked: tuple[str, int], answer: Json) -> None:
        """Note what halfway answered, whether it arrives or not."""
        ref, sent_at = asked
        told: Json = answer.get("body") or answer.get("problem") or {}
        state, code, status = told.get("state"), told.get("error_code"), answer["status"]
        if step == "prepare":
            self._history.write(
                Prepared(ref=ref, status=status, sent_at=sent_at, id=item["id"], state=state, error_code=code)
            )
        else:
            self._history.write(
                Ended(
                    id=item["id"],
                    outcome=item["outcome"],
                    status=status,
                    sent_at=sent_at,
                    state=state,
                    error_code=code,
                )
            )

    def operator_ends(self, order: str, outcome: Any) -> None:
        """Note that an operator is about to end a transaction."""
        self._history.write(End(id=order, outcome=outcome, by="operator"))

    def judge(self, bootstrap_servers: str, orders: Mapping[str, str], fenced: Collection[str]) -> list[Problem]:
        """Close the history with what the order service's database has answered to checks, and judge it."""
        for order, state in [*orders.items(), *((order, "fenced") for order in fenced)]:
            said: Any = VERDICTS[state]
            self._history.write(Checked(id=order, said=said))
        self._history.write(Rest())
        self.close()
        verdict = judge(read_history(self._path), read_topics(bootstrap_servers, prefix="_halfway.", topics=TOPICS))
        found: defaultdict[str, set[str]] = defaultdict(set)
        for finding in verdict.findings:
            found[f"{finding.count}: {finding.rule}"].add(finding.id)
        return [Problem(where="checker", what=what, orders=tuple(sorted(ids))) for what, ids in found.items()]

    def close(self) -> None:
        """Close the file."""
        self._history.__exit__(None, None, None)
