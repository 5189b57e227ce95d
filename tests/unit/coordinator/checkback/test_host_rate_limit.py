"""The rate limit of checks for each host."""

from halfway.coordinator.checkback.dispatcher import HostRateLimits

TEN_OF_ONE = tuple(f"http://SHOP.:{port}/check" for port in range(9000, 9010))


def test_a_host_gets_so_many_checks_each_second_whatever_its_urls() -> None:
    """Ports, paths and the case of letters do not make another host; the next second starts at 0."""
    rates = HostRateLimits(3)
    assert [rates.admits("shop", TEN_OF_ONE, 0) for _ in range(5)] == [True] * 3 + [False] * 2
    assert not rates.admits("shop", ("http://shop/other",), 999)
    assert rates.admits("shop", ("http://cart/",), 999)
    assert rates.admits("shop", TEN_OF_ONE, 1000)


def test_no_group_is_kept_from_a_host_by_others() -> None:
    """If other groups have used up the rate, a group can still send one check per second."""
    rates = HostRateLimits(3)
    assert [rates.admits("busy", TEN_OF_ONE, 0) for _ in range(4)] == [True] * 3 + [False]
    assert [rates.admits("other", TEN_OF_ONE, 0) for _ in range(2)] == [True, False]
