"""A good run, and each way to forge it with the findings that it must give."""

from collections.abc import Callable

from checker.content import Content, content_of
from checker.history import AnyEvent, Checked, End, Ended, Fault, Looked, Prepare, Prepared, Rest, Run
from checker.records import AnyRecord, Half, Op, Parked, Real

History = list[AnyEvent]
Topics = list[AnyRecord]
SAME = content_of("orders", b"k", b"same")


def content(name: str, topic: str = "orders") -> Content:
    return content_of(topic, b"k", name.encode(), [("trace", b"1")])


def op(transaction: str, kind: str, *, offset: int, cause: str = "producer", checks: int = 0) -> Op:
    return Op(shard=0, offset=offset, id=transaction, kind=kind, cause=cause, checks=checks)


def half(transaction: str, *contents: Content, offset: int) -> Half:
    return Half(shard=0, offset=offset, id=transaction, contents=contents or None)


def real(transaction: str, place: str, what: Content, *, offset: int) -> Real:
    number, total = place.split("/")
    return Real(shard=0, offset=offset, id=transaction, content=what, number=int(number), total=int(total))


def good() -> tuple[History, Topics]:
    """Give a run of five: committed, rolled back, committed by check, its answer lost, and one that never arrived."""
    history: History = [
        Run(seed=7, topics=("orders", "points")),
        Prepare(at=1, ref="r1", group="g", contents=(SAME, SAME, content("a", "points")), id="a"),
        Prepared(at=2, sent_at=1, ref="r1", status=201, id="a", state="prepared"),
        End(at=3, id="a", outcome="commit"),
        Ended(at=4, sent_at=3, id="a", outcome="commit", status=200, state="committed", changed=True),
        Prepare(at=5, ref="r2", group="g", contents=(content("b"),)),
        Prepared(at=6, sent_at=5, ref="r2", status=201, id="0-b", state="prepared"),
        End(at=7, id="0-b", outcome="rollback"),
        Ended(at=8, sent_at=7, id="0-b", outcome="rollback", status=0),
        Fault(at=9, kind="kill", target="coordinator-1"),
        Fault(at=9, kind="kill", target="coordinator-2", counts=False),
        Prepare(at=10, ref="r3", group="g", contents=(content("c"),)),
        Prepared(at=11, sent_at=10, ref="r3", status=0),
        Checked(at=12, id="0-c", said="nothing", manner="status 500"),
        Checked(at=13, id="0-c", said="rollback"),
        Prepare(at=14, ref="r4", group="g", contents=(content("d"),), id="d"),
        Prepared(at=15, sent_at=14, ref="r4", status=201, id="d", state="prepared"),
        Checked(at=16, id="d", said="commit"),
        Looked(at=17, sent_at=16, id="d", status=200, state="committed"),
        Prepare(at=18, ref="r5", group="g", contents=(content("e"),), id="e"),
        Prepared(at=19, sent_at=18, ref="r5", status=0),
        End(at=20, id="e", outcome="commit"),
        Ended(at=21, sent_at=20, id="e", outcome="commit", status=404, error_code="unknown_transaction"),
        Rest(at=22),
    ]
    topics: Topics = [
        half("a", SAME, SAME, content("a", "points"), offset=1),
        half("0-b", content("b"), offset=2),
        half("0-c", content("c"), offset=3),
        half("d", content("d"), offset=4),
        half("a", offset=5),
        half("0-b", offset=6),
        half("0-c", offset=7),
        half("d", offset=8),
        op("a", "COMMITTED", offset=1),
        op("0-b", "ROLLED_BACK", offset=2),
        op("0-c", "CHECKED", offset=3, cause="check"),
        op("0-c", "ROLLED_BACK", offset=4, cause="check"),
        op("d", "COMMITTED", offset=5, cause="check"),
        real("a", "1/3", SAME, offset=1),
        real("a", "2/3", SAME, offset=2),
        real("a", "3/3", content("a", "points"), offset=1),
        real("d", "1/1", content("d"), offset=3),
    ]
    return history, topics


Forgery = Callable[[History, Topics], object]


def all_of(*forgeries: Forgery) -> Forgery:
    def forge(history: History, topics: Topics) -> None:
        for one in forgeries:
            one(history, topics)

    return forge


def adds(*records: AnyRecord) -> Forgery:
    """Return a forgery that writes records."""
    return lambda _, topics: topics.extend(records)


def lacks(*gone: object) -> Forgery:
    """Return a forgery that takes out records by their id, or by id and message number."""
    return lambda _, topics: without(topics, *gone)


def unmarked(transaction: str) -> Forgery:
    """Return a forgery that takes out what op says of an id."""
    return lambda _, topics: no_op(topics, transaction)


def tells(*events: AnyEvent) -> Forgery:
    """Return a forgery of what callers were told last."""
    return lambda history, _: at_end(history, *events)


def untold(*places: int) -> Forgery:
    """Return a forgery that takes out events by their places in the good run."""

    def forge(history: History, _: Topics) -> None:
        for place in sorted(places, reverse=True):
            del history[place]

    return forge


def without(topics: Topics, *gone: object) -> None:
    """Take out records by their id, or by id and message number."""
    topics[:] = [
        record
        for record in topics
        if record.id not in gone and not (isinstance(record, Real) and (record.id, record.number) in gone)
    ]


def at_end(history: History, *events: AnyEvent) -> None:
    history[-1:-1] = events


def other_bytes(topics: Topics) -> None:
    topics[-1] = real("d", "1/1", content("other"), offset=3)


def no_op(topics: Topics, transaction: str) -> None:
    topics[:] = [record for record in topics if not (isinstance(record, Op) and record.id == transaction)]


def no_tombstone(topics: Topics, transaction: str) -> None:
    topics[:] = [
        record
        for record in topics
        if not (isinstance(record, Half) and record.id == transaction and record.contents is None)
    ]


def by_policy(checks: int) -> Forgery:
    """Have 0-c rolled back by the policy of its group, which nobody answered."""

    def forge(history: History, topics: Topics) -> None:
        history[:] = [event for event in history if not (isinstance(event, Checked) and event.said == "rollback")]
        history[0] = Run(seed=7, topics=("orders", "points"), policy_rolls_back=("g",))
        no_op(topics, "0-c")
        topics.append(op("0-c", "ROLLED_BACK", offset=4, cause="policy", checks=checks))

    return forge


def marker(transaction: str, kind: str, message: tuple[str, str | None, str | None], *, cause: str) -> Op:
    """Return an op marker that names the content of one message."""
    return Op(shard=0, offset=9, id=transaction, kind=kind, cause=cause, messages=(message,))


OTHER = content("z")


FORGERIES: dict[str, tuple[Forgery, set[tuple[str, str, str]]]] = {
    "an acknowledged commit is in no topic": (lacks(("d", 1)), {("lost", "committed_and_not_there", "d")}),
    "a commit that only its marker shows is in no topic": (
        all_of(untold(18), lacks(("d", 1))),
        {("lost", "committed_and_not_there", "d")},
    ),
    "one of two equal messages is missing": (lacks(("a", 2)), {("torn", "committed_in_part", "a")}),
    "one of several topics has nothing": (lacks(("a", 3)), {("torn", "committed_in_part", "a")}),
    "a message counts fewer than were prepared": (
        all_of(lacks(("a", 3)), adds(real("a", "3/4", content("a", "points"), offset=9))),
        {("torn", "number_of_messages_differs", "a")},
    ),
    "other bytes stand in the topic": (lambda _, topics: other_bytes(topics), {("lost", "payload_differs", "d")}),
    "other headers stand in the topic": (
        lambda _, topics: topics.__setitem__(-1, real("d", "1/1", content_of("orders", b"k", b"d"), offset=3)),
        {("lost", "payload_differs", "d")},
    ),
    "a message stands twice": (
        adds(real("d", "1/1", content("d"), offset=9)),
        {("doubled", "message_stands_again", "d")},
    ),
    "a message of a rolled back transaction stands": (
        adds(real("0-b", "1/1", content("b"), offset=9)),
        {("leaked", "message_without_commit_marker", "0-b")},
    ),
    "a message stands of an id that nobody ever prepared": (
        adds(real("x", "1/1", content("x"), offset=9)),
        {("leaked", "message_nobody_prepared", "x"), ("leaked", "message_without_commit_marker", "x")},
    ),
    "a message stands that names no transaction": (
        adds(real("", "0/0", content("x"), offset=9)),
        {("leaked", "message_of_no_transaction", "")},
    ),
    "a half that nobody prepared": (
        lambda _, topics: topics.insert(0, half("a", content("x"), offset=0)),
        {("leaked", "half_nobody_prepared", "a")},
    ),
    "a commit that nobody gave": (
        untold(17),
        {("leaked", "message_nobody_committed", "d"), ("contradicted", "outcome_nobody_gave", "d")},
    ),
    "a rollback that nobody gave": (untold(7), {("contradicted", "outcome_nobody_gave", "0-b")}),
    "an error page with a verdict in it resolves": (untold(14), {("contradicted", "outcome_nobody_gave", "0-c")}),
    "two outcomes are acknowledged": (
        tells(
            End(at=21, id="a", outcome="rollback"),
            Ended(at=21, sent_at=21, id="a", outcome="rollback", status=200, state="rolled_back", changed=True),
        ),
        {("contradicted", "two_outcomes", "a")},
    ),
    "a refusal names another outcome": (
        tells(
            Ended(
                at=21, sent_at=21, id="a", outcome="commit", status=409, state="rolled_back", error_code="already_ended"
            )
        ),
        {("contradicted", "two_outcomes", "a")},
    ),
    "the marker says another outcome than the answer": (
        all_of(tells(End(at=21, id="a", outcome="rollback")), unmarked("a"), adds(op("a", "ROLLED_BACK", offset=9))),
        {("contradicted", "two_outcomes", "a"), ("leaked", "message_without_commit_marker", "a")},
    ),
    "it is resolved twice": (adds(op("0-b", "ROLLED_BACK", offset=9)), {("contradicted", "resolved_twice", "0-b")}),
    "a marker is of another content": (
        all_of(unmarked("d"), adds(marker("d", "COMMITTED", ("orders", "1", "2"), cause="check"))),
        {("contradicted", "marker_of_another_content", "d")},
    ),
    "other content than the acknowledged one is delivered": (
        all_of(
            tells(Prepare(at=14, ref="r9", group="g", contents=(OTHER,), id="d")),
            lambda _, topics: topics.insert(0, half("d", OTHER, offset=3)),
            unmarked("d"),
            adds(marker("d", "COMMITTED", (OTHER.topic, OTHER.key, OTHER.value), cause="check")),
            lacks(("d", 1)),
            adds(real("d", "1/1", OTHER, offset=3)),
        ),
        {("lost", "payload_differs", "d"), ("contradicted", "marker_of_another_content", "d")},
    ),
    "other content than the acknowledged one is rolled back": (
        all_of(
            tells(Prepare(at=14, ref="r9", group="g", contents=(OTHER,), id="0-b")),
            unmarked("0-b"),
            adds(marker("0-b", "ROLLED_BACK", (OTHER.topic, OTHER.key, OTHER.value), cause="producer")),
        ),
        {("contradicted", "marker_of_another_content", "0-b")},
    ),
    "an acknowledged outcome has no marker": (
        all_of(unmarked("a"), lacks(("a", 1), ("a", 2), ("a", 3)), lambda _, topics: no_tombstone(topics, "a")),
        {
            ("lost", "told_an_outcome_that_is_not_marked", "a"),
            ("lost", "committed_and_not_there", "a"),
            ("stuck", "no_outcome", "a"),
        },
    ),
    "an outcome is taken back": (
        tells(Looked(at=21, sent_at=20, id="a", status=200, state="prepared")),
        {("contradicted", "outcome_taken_back", "a")},
    ),
    "two contents are acknowledged under one id": (
        tells(
            Prepare(at=21, ref="r9", group="g", contents=(OTHER,), id="d"),
            Prepared(at=21, sent_at=21, ref="r9", status=200, id="d", state="committed"),
        ),
        {("contradicted", "two_contents_acknowledged", "d")},
    ),
    "an acknowledged prepare is not there": (
        all_of(untold(7, 8), lacks("0-b")),
        {("lost", "acknowledged_prepare_is_not_there", "0-b")},
    ),
    "an acknowledged prepare is gone without an outcome": (
        all_of(untold(7, 8), unmarked("0-b")),
        {("lost", "acknowledged_prepare_went_without_an_outcome", "0-b")},
    ),
    "an acknowledged prepare is unknown": (
        tells(Looked(at=21, sent_at=20, id="0-b", status=404, error_code="unknown_transaction")),
        {("lost", "acknowledged_prepare_is_unknown", "0-b")},
    ),
    "messages of one transaction stand in another order": (
        lambda _, topics: topics.__setitem__(slice(-4, -2), [real("a", f"{n}/3", SAME, offset=9 - n) for n in (1, 2)]),
        {("disordered", "messages_out_of_order", "a")},
    ),
    "policy rolls back without a check": (by_policy(0), {("contradicted", "policy_before_any_check", "0-c")}),
    "policy counts checks that never arrived": (
        all_of(untold(13), by_policy(2)),
        {("contradicted", "policy_before_any_check", "0-c")},
    ),
    "policy rolls back behind a verdict that was written down": (
        all_of(by_policy(2), adds(op("0-c", "VERDICT", offset=3, cause="check"))),
        {("contradicted", "policy_against_a_commit", "0-c")},
    ),
    "policy rolls back against a commit that was refused because of its topic": (
        all_of(
            by_policy(2),
            tells(Ended(at=9, sent_at=8, id="0-c", outcome="commit", status=503, error_code="topic_unavailable")),
        ),
        {("contradicted", "policy_against_a_commit", "0-c")},
    ),
    "it is pending for ever": (
        all_of(unmarked("0-c"), lambda _, topics: no_tombstone(topics, "0-c")),
        {("stuck", "no_outcome", "0-c")},
    ),
    "it is parked for ever": (
        all_of(unmarked("0-c"), adds(Parked(shard=0, offset=1, id="0-c"))),
        {("stuck", "no_outcome", "0-c")},
    ),
    "it ended and its half is left": (
        lambda _, topics: no_tombstone(topics, "0-c"),
        {("stuck", "ended_and_still_in_the_log", "0-c")},
    ),
}
