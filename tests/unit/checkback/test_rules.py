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


NO_SERVICES = {
    "169.254.169.254": "most clouds",
    "169.254.170.23": "credentials of pods",
    "fe80::a9fe:a9fe": "OpenStack",
    "fe80::1": "link-local",
    "fd00:ec2::254": "AWS",
    "fd00:ec2::23": "credentials of pods",
    "fd20:ce::254": "Google Cloud",
    "fd00:c1::a9fe:a9fe": "Oracle Cloud",
    "fd00:42::42": "Scaleway",
    "100.100.100.200": "Alibaba Cloud",
    "168.63.129.16": "Azure",
    "192.0.0.192": "Oracle Cloud",
    "224.0.0.1": "multicast",
    "ff02::1": "multicast",
    "0.0.0.0": "unspecified",  # noqa: S104
    "::": "unspecified",
    "0.1.2.3": "this network",
    "255.255.255.255": "broadcast",
    "::ffff:169.254.169.254": "mapped",
    "::ffff:6464:64c8": "mapped, of no service",
    "::169.254.169.254": "compatible",
    "::a83f:8110": "compatible, of no service",
    "::ffff:0:169.254.169.254": "translated",
    "64:ff9b::a9fe:a9fe": "NAT64",
    "64:ff9b::100.100.100.200": "NAT64, of no service",
    "64:ff9b:1::a9fe:a9fe": "NAT64 of the network's own, /96",
    "64:ff9b:1:a9fe:a9:fe00::": "NAT64 of the network's own, /48",
    "64:ff9b:1:a9:fe:a9fe::": "NAT64 of the network's own, /56",
    "64:ff9b:1:0:a9:fea9:fe00:0": "NAT64 of the network's own, /64",
    "2002:a9fe:a9fe::1": "6to4",
    "2002:c000:c0::": "6to4, of no service",
    "2001:0:a9fe:a9fe::1": "Teredo's server",
    "2001:0:5db8:d822:0:0:5601:5601": "Teredo's client",
    "2001:db8::5efe:a9fe:a9fe": "ISATAP",
    "2001:db8::200:5efe:a9fe:a9fe": "ISATAP",
}


@pytest.mark.parametrize("address", [pytest.param(one, id=f"{one} ({of})") for one, of in NO_SERVICES.items()])
def test_metadata_servers_and_their_like_are_refused_unless_a_network_names_them(address: str) -> None:
    """Also when IPv6 carries them, and when the URL has the address itself; the refusal names the setting."""
    assert not AllowedHosts().allows(ip_address(address))
    named = AllowedHosts(networks=[ip_network("0.0.0.0/0"), ip_network("::/0")])
    assert named.allows(ip_address(address))
    host = f"[{address}]" if ":" in address else address
    assert "HALFWAY_CHECK_NETWORKS" in str(AllowedHosts().refusal(URL(f"http://{host}/latest")))
    assert named.refusal(URL(f"http://{host}/latest")) is None


@pytest.mark.parametrize(
    "host",
    [
        "2852039166",
        "0xa9fea9fe",
        "0xA9FEA9FE",
        "0xa9.0xfe.0xa9.0xfe",
        "0251.0376.0251.0376",
        "0251.254.0xa9fe",
        "169.254.43518",
        "169.16689662",
        "169.254.169.254.",
        "[fe80::1%25eth0]",
        "[::FFFF:169.254.169.254]",
        "[0:0:0:0:0:ffff:a9fe:a9fe]",
        "\uff11\uff16\uff19.254.169.254",
        "169\u3002254\u3002169\u3002254",
    ],
)
def test_no_other_spelling_of_such_an_address_is_registered(host: str) -> None:
    """What the C library or the URL's own rules take for the address is refused like the address."""
    try:
        url = URL(f"http://{host}/latest")
    except ValueError:
        return  # not a URL: refused before
    assert "HALFWAY_CHECK_NETWORKS" in str(AllowedHosts().refusal(url))


@pytest.mark.parametrize("host", ["orders", "a1", "fade", "beef.shop", "0x", "1.2.3.4.5", "10.0.0.1", "[2001:db8::1]"])
def test_a_name_that_looks_like_a_number_is_a_name(host: str) -> None:
    """What spells no address is looked up when it is called."""
    assert AllowedHosts().refusal(URL(f"http://{host}/check")) is None


@pytest.mark.parametrize(
    "address",
    ["64:ff9b::10.0.0.1", "64:ff9b:1::10.0.0.1", "2002:a00:1::1", "::ffff:10.0.0.1", "2600:1f18::1", "fd00::1"],
)
def test_services_may_be_reached_through_a_translation(address: str) -> None:
    """Only what leads to no service is refused, not the ways to IPv4 as such."""
    assert AllowedHosts().allows(ip_address(address))


def test_a_network_names_a_metadata_server_by_its_own_address_too() -> None:
    """All of IPv6 does not hold an IPv4 address that is written in it."""
    rule = AllowedHosts(networks=[ip_network("::/0")])
    assert not rule.allows(ip_address("64:ff9b::a9fe:a9fe"))
    assert rule.allows(ip_address("64:ff9b::a00:1"))


def test_with_networks_nothing_outside_them_is_called() -> None:
    rule = AllowedHosts(networks=[ip_network("10.0.0.0/8"), ip_network("fd00::/8")])
    assert [rule.allows(ip_address(one)) for one in ("10.9.9.9", "fd00::1", "::ffff:10.0.0.1")] == [True] * 3
    assert [rule.allows(ip_address(one)) for one in ("11.0.0.1", "127.0.0.1", "::1")] == [False] * 3


def test_the_default_calls_any_service_but_nothing_that_is_no_service() -> None:
    rule = AllowedHosts()
    assert rule.refusal(URL("http://orders:9000/check")) is None
    assert rule.refusal(URL("ftp://orders/check")) is not None
    assert all(rule.allows(ip_address(one)) for one in ("127.0.0.1", "::1", "10.0.0.1", "93.184.216.34"))
