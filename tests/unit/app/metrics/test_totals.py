"""The totals that statistics show are those of the metrics, of one group or of all."""

from halfway.app.metrics import MAX_GROUPS, OTHER, Metrics
from halfway.coordinator.records import Totals


def test_a_group_gets_its_own_totals_alone() -> None:
    """Not those of groups that are counted together, whatever its name is."""
    metrics = Metrics()
    for group, count in (("shop", 2), ("mall", 3)):
        metrics.prepared({group: count}, "prepared", 0.1)
        metrics.prepared({group: 50}, "group_limited", 0.1)
        metrics.resolved_after({group: count}, "commit", 1.0)
        metrics.checked(group, "none", sent=True, seconds=0.1)
    metrics.lane_committed(4, 100, 0.5)
    metrics.lane_failed("fenced")
    assert metrics.totals("shop") == Totals(prepares=2, commits=2, checks_none=1)
    for number in range(MAX_GROUPS):
        metrics.prepared({f"g{number}": 1}, "prepared", 0.1)
    for group in ("nobody", OTHER, f"g{MAX_GROUPS - 1}"):
        assert metrics.totals(group) == Totals()
    assert metrics.totals(None) == Totals(
        prepares=5 + MAX_GROUPS, commits=5, checks_none=2, lane_commits=1, lane_ends=4, lane_s=0.5, lane_failures=1
    )
