"""Many more callers than may be in flight, with the benchmark's own code. The figures are not checked here."""

from bench.measures.overload import OverloadOptions, overload
from bench.measures.scenarios import load_plan, run_audited_load
from bench.plan import SCENARIOS
from bench.system.rig import Rig
from tests.support.brokers.fixtures import Kafka

SETTINGS = {"HALFWAY_MAX_REQUESTS": "24", "HALFWAY_PREPARE_WAIT_S": "0.05"}
NEVER_S = 60.0
"""A patience that is long enough for every caller, on a slow machine too."""
GENEROUS_MIB = 200.0


def test_a_crowd_is_served_or_told_when_to_come_again(kafka: Kafka) -> None:
    """Each refusal is 429 or 503 with Retry-After and a problem document; health answers all the time.

    Memory does not grow with the number of callers, no acknowledged transaction is lost or doubled, and afterwards all
    callers are served again.
    """
    said: list[str] = []
    wanted = OverloadOptions(
        times=10,
        seconds=6,
        connections=400,
        patience_s=NEVER_S,
        before_s=1,
        after_s=1,
        warm_up_s=0,
        maximum_s=3,
        callers=6,
        nice=0,
    )
    with Rig(say=said.append, bootstrap_servers=kafka.bootstrap_servers, settings=SETTINGS, name="bench-crowd") as rig:
        found = overload(rig, wanted)
        # Sequentially: of several at once, one may wait longer for a place than these settings allow.
        single = next(one for one in SCENARIOS if one.name == "single-1")
        afterwards = run_audited_load(rig, load_plan(rig, single, lead_s=0, window_s=0.5))

    assert found.connections == 400, "more than may be in flight, and all of them were held"
    assert found.prepares.keys() <= {"201", "429", "503"}, found.prepares
    assert found.ends.keys() <= {"200", "429", "503"}, found.ends
    assert found.prepares["429"] > 0, "it was overloaded"
    assert found.ends["200"] == found.prepares["201"], "whatever was begun was ended"
    assert found.refused_without_retry_after == 0
    assert found.unlike == 0, found.first_unlike
    assert found.left_over == 0, "nobody began what nobody ends"
    for one in found.health:
        assert one.answers.keys() == {"200"}, one
    assert max(found.held.rss_mib, found.held_after.rss_mib) < found.held_before.rss_mib + GENEROUS_MIB
    wrong = (found.missing, found.doubled, found.extra, found.contradicted, found.stuck)
    assert not any(wrong), found.first_finding
    assert afterwards.result.failed == 0, afterwards.result.first_failure
    assert afterwards.audit.clean, afterwards.audit
