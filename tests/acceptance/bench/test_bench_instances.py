"""A short run of the benchmarks of several instances, and their reports. The figures are not checked here."""

from bench.measures.frozen import FrozenOptions, measure_frozen
from bench.measures.instances import InstancesOptions, measure_instances
from bench.measures.takeover import TakeoverOptions, measure_takeovers
from bench.system.fleet import FleetRig
from tests.support.brokers.fixtures import Kafka


def test_several_instances_are_measured_and_their_audit_is_clean(kafka: Kafka) -> None:
    """Nothing is forwarded if the owner gets the calls; everything is if the other instance gets them."""
    with FleetRig(say=print, bootstrap_servers=kafka.bootstrap_servers, name="bench-instances") as rig:
        spread = InstancesOptions(warm_up_s=0, lead_s=0, run_s=0.5, counts=(1, 2), callers=8)
        found = measure_instances(rig, spread, say=print)
    assert found.clean, found
    shares = [(line.instances, line.asked, line.forwarded_share) for line in found.lines]
    assert shares[:2] == [(1, "the owner", 0), (2, "the owner", 0)]
    assert 0 < shares[2][2] < 1
    assert shares[3:] == [(2, "the one owner", 0), (2, "the other one", 1)]
    assert found.forwarded is not None
    for line in found.lines:
        assert line.transactions > 0
        assert len(line.each_cpu_us) == line.instances


def test_takeovers_are_measured_and_nothing_is_lost_or_doubled(kafka: Kafka) -> None:
    with FleetRig(say=print, bootstrap_servers=kafka.bootstrap_servers, name="bench-takeover") as rig:
        taking = TakeoverOptions(sessions_s=(8,), rate_per_s=20, lead_s=1, after_s=1)
        found = measure_takeovers(rig, taking, say=print)
    assert [line.event.split(" (")[0] for line in found.lines] == [
        "a fourth joins",
        "one of four is stopped",
        "one of three is killed",
    ]
    assert found.clean, found
    for line in found.lines:
        assert line.shards > 0
        assert line.requests > 0
        assert line.most_s > 0


def test_how_long_a_frozen_instance_holds_consumers_back_is_measured(kafka: Kafka) -> None:
    with FleetRig(say=print, bootstrap_servers=kafka.bootstrap_servers, name="bench-frozen") as rig:
        [line] = measure_frozen(rig, FrozenOptions(sessions_s=(8,), timeouts_s=()), say=print)
    assert (line.instances, line.copies) == (2, 1)
    assert line.held_back_s > 0
    assert line.served_again_s is not None
