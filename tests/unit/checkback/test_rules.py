"""What the operator's settings let halfway call."""

from ipaddress import ip_address, ip_network

import pytest
from yarl import URL

from halfway.checkback import AllowedHosts


@pytest.mark.parametrize(
    "url",
    ["http://orders:9000/check", "https://a.shop.svc/check", "http://A.SHOP.SVC./check", "http://10.1.2.3/check"],
)
def test_a_host_that_is_named_or_matches_a_pattern_may_be_called(url: str) -> None:
    assert AllowedHosts(["orders", "*.shop.svc", "10.1.2.3"]).refusal(URL(url)) is None


@pytest.mark.parametrize(
    "url", ["http://orders.evil.org/", "http://shop.svc/", "http://a.shop.svc.evil.org/", "http://10.1.2.30/"]
)
def test_any_other_host_is_refused_with_the_setting_that_does(url: str) -> None:
    refusal = AllowedHosts(["orders", "*.shop.svc", "10.1.2.3"]).refusal(URL(url))
    assert refusal is not None
    assert "HALFWAY_CHECK_HOSTS" in refusal
    assert str(URL(url).host) in refusal


@pytest.mark.parametrize(
    "address",
    ["169.254.169.254", "fe80::1", "224.0.0.1", "0.0.0.0", "::", "::ffff:169.254.169.254", "ff02::1"],  # noqa: S104
)
def test_metadata_servers_and_their_like_are_refused_unless_a_network_names_them(address: str) -> None:
    """Also in IPv6's clothes, and when the URL has the address itself."""
    assert not AllowedHosts().allows(ip_address(address))
    named = AllowedHosts(networks=[ip_network("0.0.0.0/0"), ip_network("::/0")])
    assert named.allows(ip_address(address))
    host = f"[{address}]" if ":" in address else address
    assert "HALFWAY_CHECK_NETWORKS" in str(AllowedHosts().refusal(URL(f"http://{host}/latest")))


def test_with_networks_nothing_outside_them_is_called() -> None:
    rule = AllowedHosts(networks=[ip_network("10.0.0.0/8"), ip_network("fd00::/8")])
    assert [rule.allows(ip_address(one)) for one in ("10.9.9.9", "fd00::1", "::ffff:10.0.0.1")] == [True] * 3
    assert [rule.allows(ip_address(one)) for one in ("11.0.0.1", "127.0.0.1", "::1")] == [False] * 3


def test_the_default_calls_any_service_but_nothing_that_is_no_service() -> None:
    rule = AllowedHosts()
    assert rule.refusal(URL("http://orders:9000/check")) is None
    assert rule.refusal(URL("ftp://orders/check")) is not None
    assert all(rule.allows(ip_address(one)) for one in ("127.0.0.1", "::1", "10.0.0.1", "93.184.216.34"))
