"""The destinations that the operator's settings allow."""

from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network

import pytest
from hypothesis import given
from hypothesis import strategies as st
from yarl import URL

from halfway.checks import Destinations


@pytest.mark.parametrize(
    "url", ["http://orders:9000/check", "https://a.shop.svc/check", "http://A.SHOP.SVC./check", "http://10.1.2.3/check"]
)
def test_a_host_that_is_named_or_matches_a_pattern_may_be_called(url: str) -> None:
    assert Destinations(hosts=["orders", "*.shop.svc", "10.1.2.3"]).refusal(URL(url)) is None


@pytest.mark.parametrize(
    "url", ["http://orders.evil.org/", "http://shop.svc/", "http://a.shop.svc.evil.org/", "http://10.1.2.30/"]
)
def test_any_other_host_is_refused_with_the_setting_that_does(url: str) -> None:
    refusal = Destinations(hosts=["orders", "*.shop.svc", "10.1.2.3"]).refusal(URL(url))
    assert refusal is not None
    assert "HALFWAY_CHECK_HOSTS" in refusal
    assert str(URL(url).host) in refusal


NO_SERVICES = {
    "127.0.0.1": "loopback",
    "127.200.0.1": "loopback",
    "::1": "loopback",
    "::ffff:127.0.0.1": "mapped loopback",
    "::127.0.0.1": "compatible loopback",
    "64:ff9b::7f00:1": "NAT64, loopback",
    "2002:7f00:1::": "6to4, loopback",
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


def connecting(rule: Destinations, address: str) -> str | None:
    """Return the rule's result for a connection to a name with this address."""
    return rule.refusal(URL("http://orders/check"), ip_address(address))


def spelt(rule: Destinations, address: str) -> str | None:
    """Return the rule's result for a URL with this address."""
    return rule.refusal(f"http://[{address}]/latest" if ":" in address else f"http://{address}/latest")


@pytest.mark.parametrize("address", [pytest.param(one, id=f"{one} ({of})") for one, of in NO_SERVICES.items()])
def test_loopback_metadata_servers_and_their_like_are_refused_unless_a_network_names_them(address: str) -> None:
    """Also if IPv6 carries them, and if the URL contains the address; the refusal names the setting."""
    assert "HALFWAY_CHECK_ALSO_NETWORKS" in str(connecting(Destinations(), address))
    assert "HALFWAY_CHECK_ALSO_NETWORKS" in str(spelt(Destinations(), address))
    everything = [ip_network("0.0.0.0/0"), ip_network("::/0")]
    for named in (Destinations(networks=everything), Destinations(also_networks=everything)):
        assert connecting(named, address) is None
        assert spelt(named, address) is None


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
    """A spelling that the C library or the URL rules read as the address is refused like the address."""
    try:
        url = URL(f"http://{host}/latest")
    except ValueError:
        return  # not a URL: refused before
    assert "HALFWAY_CHECK_ALSO_NETWORKS" in str(Destinations().refusal(url))


@pytest.mark.parametrize("host", ["orders", "a1", "fade", "beef.shop", "0x", "1.2.3.4.5", "10.0.0.1", "[2001:db8::1]"])
def test_a_name_that_looks_like_a_number_is_a_name(host: str) -> None:
    """A host that is not an address is looked up when it is called."""
    assert Destinations().refusal(URL(f"http://{host}/check")) is None


@pytest.mark.parametrize(
    "address",
    ["64:ff9b::10.0.0.1", "64:ff9b:1::10.0.0.1", "2002:a00:1::1", "::ffff:10.0.0.1", "2600:1f18::1", "fd00::1"],
)
def test_services_may_be_reached_through_a_translation(address: str) -> None:
    """Only destinations without a service are refused, not the ways to IPv4 in general."""
    assert connecting(Destinations(), address) is None


def test_a_network_names_a_metadata_server_by_its_own_address_too() -> None:
    """All of IPv6 does not include an IPv4 address that is embedded in it."""
    rule = Destinations(networks=[ip_network("::/0")])
    assert connecting(rule, "64:ff9b::a9fe:a9fe") is not None
    assert connecting(rule, "64:ff9b::a00:1") is not None
    assert connecting(rule, "64:ff9b::5db8:d822") is None


def test_with_networks_nothing_outside_them_is_called_but_what_is_named_beside_them() -> None:
    rule = Destinations(
        networks=[ip_network("10.0.0.0/8"), ip_network("fd00::/8")], also_networks=[ip_network("127.0.0.0/8")]
    )
    for allowed in ("10.9.9.9", "fd00::1", "::ffff:10.0.0.1", "127.0.0.1"):
        assert connecting(rule, allowed) is None
    for refused in ("11.0.0.1", "::1", "192.168.0.1"):
        assert "HALFWAY_CHECK_NETWORKS" in str(connecting(rule, refused))


@pytest.mark.parametrize(
    "address",
    ["10.0.0.1", "172.16.0.1", "192.168.1.1", "100.64.0.1", "fd12::1", "fec0::1", "::ffff:10.0.0.1", "64:ff9b::a00:1"],
)
def test_private_networks_are_called_unless_the_operator_closes_them(address: str) -> None:
    """One network can be allowed again; the refusal names the setting."""
    closed = Destinations(networks=["public"])
    assert connecting(Destinations(), address) is None
    assert "HALFWAY_CHECK_NETWORKS" in str(connecting(closed, address))
    assert "HALFWAY_CHECK_NETWORKS" in str(spelt(closed, address))
    opened = Destinations(
        networks=["public"], also_networks=[ip_network(one) for one in ("10.0.0.0/8", "::/0", "0.0.0.0/0")]
    )
    assert connecting(opened, address) is None
    assert connecting(closed, "93.184.216.34") is None


def test_the_default_calls_any_service_over_http() -> None:
    rule = Destinations()
    assert rule.refusal("http://orders:9000/check") is None
    assert rule.refusal("ftp://orders/check") is not None
    assert all(connecting(rule, one) is None for one in ("10.0.0.1", "93.184.216.34", "2606:2800:220::1"))


def in_ipv6(number: int) -> list[int]:
    """Return IPv6 addresses that lead to an IPv4 address, each in another way."""
    local_nat64 = 0x64_FF9B_0001 << 80
    return [
        0xFFFF << 32 | number,
        0xFFFF << 48 | number,
        0x64_FF9B << 96 | number,
        *(
            [
                local_nat64 | number,
                local_nat64 | number << 24,
                local_nat64 | (number >> 16) << 64 | (number & 0xFFFF) << 40,
            ]
            if number >> 24
            else []
        ),
        0x2002 << 112 | number << 80 | 1,
        0x2001 << 112 | number << 64 | 0x5DB8_D822,
        0x2001 << 112 | 0x5DB8_D822 << 64 | (number ^ 0xFFFF_FFFF),
        0x2001_0DB8 << 96 | 0x5EFE << 32 | number,
        *([number] if number > 1 else []),
    ]


def spellings(number: int) -> list[str]:
    """Return ways to write an IPv4 address in a URL that the C library understands."""
    parts = list(number.to_bytes(4, "big"))
    return [
        str(IPv4Address(number)),
        str(number),
        hex(number),
        f"0{number:o}",
        ".".join(hex(part) for part in parts),
        ".".join(f"0{part:o}" for part in parts),
        f"{parts[0]}.{number & 0xFF_FFFF}",
        f"{parts[0]}.{parts[1]}.{number & 0xFFFF}",
        f"0{parts[0]:o}.{parts[1]}.{hex(number & 0xFFFF)}",
        *(f"[{IPv6Address(one)}]" for one in in_ipv6(number)),
    ]


SPECIAL = [ip_network(one) for one in ("127.0.0.0/8", "169.254.0.0/16", "224.0.0.0/4", "0.0.0.0/8")]
special_addresses = st.sampled_from(SPECIAL).flatmap(
    lambda network: st.integers(int(network.network_address), int(network.broadcast_address))
)


@given(number=special_addresses, choice=st.integers(min_value=0))
def test_a_special_address_is_refused_however_it_is_spelt_and_whatever_carries_it(number: int, choice: int) -> None:
    """In decimal, octal, hexadecimal and mixed parts; mapped, compatible, translated, and tunnelled over IPv6."""
    every = spellings(number)
    host = every[choice % len(every)]
    try:
        url = URL(f"http://{host}/latest")
    except ValueError:
        return  # not a URL: refused before
    rule = Destinations()
    if number.bit_length() > 24 or host.startswith("["):
        assert rule.refusal(url) is not None, host
    carriers: list[IPv4Address | IPv6Address] = [IPv4Address(number), *map(IPv6Address, in_ipv6(number))]
    for address in carriers:
        assert rule.refusal(URL("http://orders/check"), address) is not None, address


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST.", "a.localhost"])
def test_names_of_this_machine_are_refused_without_a_look_up(host: str) -> None:
    assert "a loopback address" in str(Destinations().refusal(f"http://{host}:9000/check"))


@pytest.mark.parametrize(
    "host",
    ["%31%36%39.254.169.254", "loc%61lhost", "evil.org%23.shop.svc", "evil.org%2f.shop.svc", "evil.org;.shop.svc"],
)
def test_a_host_that_a_proxy_may_read_in_another_way_is_refused(host: str) -> None:
    """Decoding or cutting it would give an address or host that the rules did not check."""
    assert "neither a name nor an address" in str(Destinations(hosts=["*"]).refusal(f"http://{host}/check"))


def test_a_name_with_an_underscore_or_of_other_letters_is_a_name() -> None:
    assert Destinations().refusal("http://my_orders.b\N{LATIN SMALL LETTER U WITH DIAERESIS}cher.svc/check") is None


@pytest.mark.parametrize("url", ["http://u:p@orders/", "http://orders:0/", "http://", "http://a b/", "//orders/", ""])
def test_what_is_no_url_of_a_service_is_refused_without_repeating_it(url: str) -> None:
    refusal = Destinations().refusal(url)
    assert refusal is not None
    assert not url or url not in refusal
