"""Records the requests and answers between the order service and halfway for the checker (docs/verification.md)."""

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
        """Open a new history; `path` must not exist."""
        self._path = path
        self._history = HistoryWriter(path)
        self._numbers = count()
        rolls_back = tuple(group for group, policy in POLICIES.items() if policy["on_exhausted"] == "rollback")
        self._history.write(Run(seed=seed, topics=TOPICS, policy_rolls_back=rolls_back))

    def record_request(self, step: str, item: Json) -> tuple[str, int]:
        """Record a prepare or an end before halfway gets it; pass the result to `record_answer`."""
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

    def record_answer(self, step: str, item: Json, request: tuple[str, int], answer: Json) -> None:
        """Record halfway's answer, whether it reaches the service or not."""
        ref, sent_at = request
        body: Json = answer.get("body") or answer.get("problem") or {}
        state, code, status = body.get("state"), body.get("error_code"), answer["status"]
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
        """Record that an operator is about to end a transaction."""
        self._history.write(End(id=order, outcome=outcome, by="operator"))

    def judge(self, bootstrap_servers: str, orders: Mapping[str, str], fenced: Collection[str]) -> list[Problem]:
        """Complete the history with the service's answers to checks, according to its database, and judge it."""
        for order, state in [*orders.items(), *((order, "fenced") for order in fenced)]:
            verdict_of_check: Any = VERDICTS[state]
            self._history.write(Checked(id=order, said=verdict_of_check))
        self._history.write(Rest())
        self.close()
        verdict = judge(read_history(self._path), read_topics(bootstrap_servers, prefix="_halfway.", topics=TOPICS))
        ids_by_rule: defaultdict[str, set[str]] = defaultdict(set)
        for finding in verdict.findings:
            ids_by_rule[f"{finding.count}: {finding.rule}"].add(finding.id)
        return [Problem(where="checker", what=what, orders=tuple(sorted(ids))) for what, ids in ids_by_rule.items()]

    def close(self) -> None:
        """Close the file."""
        self._history.__exit__(None, None, None)
