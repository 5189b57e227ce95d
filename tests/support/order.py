"""pytest-xdist hands out first what takes longest, so that none of it starts last. A group is handed out as a whole."""

import pytest

LONGEST = ("cluster", "spark", "browser", "databases", "conformance", "spark-submit", "chaos", "brokers lost", "fleet")
"""Names of groups: minutes each."""


@pytest.hookimpl(trylast=True)  # when the groups are marked
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):
        items.sort(key=_place)


def _place(item: pytest.Item) -> int:
    groups = [mark.args[0] for mark in item.iter_markers("xdist_group") if mark.args[0] in LONGEST]
    return LONGEST.index(groups[0]) if groups else len(LONGEST)
