"""Many more callers than may be in flight, with the benchmark's own code. The figures are not checked here."""

from bench.overload import HEALTH_PATHS, Options, overload
from bench.plan import Phase
from bench.scenarios import ALL, audited, plan_of
from bench.system import Broker, Rig
from tests.support.brokers.fixtures import Kafka

SETTINGS = {"HALFWAY_MAX_REQUESTS": "24"}
NEVER_S = 60.0
"""A patience that is long enough for every caller, on a slow machine too."""
GENEROUS_MIB = 200.0


def test_a_crowd_is_served_or_told_when_to_come_again(kafka: Kafka) -> None:
    """Each refusal is 429 or 503 with Retry-After and a problem document; health answers all the time.

    Memory does not grow with the number of callers, no acknowledged transaction is lost or doubled, and afterwards all
    callers are served again.
    """
    options = Options(
        times=10, seconds=6, connections=400, patience=NEVER_S, small=1, warm_up=0, maximum=3, callers=6, nice=0
    )
    with Rig(Broker(kafka.bootstrap_servers), "bench-crowd", settings=SETTINGS) as rig:
        record = overload(rig, options, print)
        # Sequentially: of several at once, one may wait longer for a place than these settings allow.
        afterwards, audit = audited(rig, plan_of(rig, ALL["single-1"], Phase(name="run", seconds=0.5)))

    [found] = record.rows
    assert found["connections"] == 400, "more than may be in flight, and all of them were held"
    assert found["prepares"].keys() <= {"201", "429", "503"}, found
    assert found["ends"].keys() <= {"200", "429", "503"}, found
    assert found["prepares"]["429"] > 0, "it was overloaded"
    assert found["ends"]["200"] == found["prepares"]["201"], "whatever was begun was ended"
    assert found["refusals without Retry-After"] == 0
    assert found["other answers, lost connections"] == 0, record.notes
    assert found["left over and rolled back"] == 0, "nobody began what nobody ends"
    for path in HEALTH_PATHS:
        assert found[f"{path} failed"] == 0, found
        assert found[f"{path} p50 ms"] > 0, found
    assert max(found["RSS MiB in the load"], found["RSS MiB after"]) < found["RSS MiB before"] + GENEROUS_MIB
    assert not any(found[kind] for kind in ("missing", "doubled", "extra", "contradicted", "stuck")), record.notes
    assert afterwards.failed == 0, afterwards.first_failure
    assert audit.clean, audit
