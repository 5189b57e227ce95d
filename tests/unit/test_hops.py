"""Over how many modules the code of one commit is spread, so that this does not grow unseen."""

from tests.support.rest.hops import path_of_commit

MOST_MODULES = 22
MOST_HOPS = 48


async def test_a_commit_takes_no_more_hops_between_modules_than_it_did() -> None:
    """`python -m tests.support.rest.hops` shows the way. Raise a number only for a rule that needs its own module."""
    path = await path_of_commit()
    assert len(path.modules) <= MOST_MODULES, sorted(path.modules)
    assert path.hops <= MOST_HOPS, path.calls
