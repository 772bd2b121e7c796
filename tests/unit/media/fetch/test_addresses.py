"""Which hosts and addresses may be asked."""

from __future__ import annotations

import ipaddress

import pytest

from dynamo_vllm.errors import MediaRefused
from dynamo_vllm.media.fetch.addresses import Reach


def test_public_address_is_allowed_and_a_private_or_special_one_is_not() -> None:
    public = """8.8.8.8 1.1.1.1 168.63.129.15 172.32.0.1 2606:4700:4700::1111 ::ffff:8.8.8.8 64:ff9b::808:808
        2002:808:808::1"""
    special = """127.0.0.1 127.255.255.254 0.0.0.0 0.1.2.3 10.1.2.3 100.64.0.1 100.100.100.200 168.63.129.16
        169.254.0.23 169.254.169.254 172.31.255.255 192.0.0.192 192.0.2.1 192.88.99.1 192.168.0.1 198.18.0.1
        203.0.113.1 224.0.0.1 239.255.255.250 240.0.0.1 255.255.255.255
        :: ::1 ::7f00:1 ::ffff:10.0.0.1 ::ffff:168.63.129.16 ::ffff:169.254.169.254 64:ff9b::a83f:8110
        64:ff9b::a9fe:a9fe 64:ff9b:1::1 2002:a9fe:a9fe::1 2001::1 2001:db8::1 fc00::1 fd00:42::42
        fd00:ec2::254 fd20:ce::254 fe80::1 fe80::1%eth0 ff02::1 ff0e::1 fec0::1 100::1 3fff::1 5f00::1
        4000::1"""
    assert [address for address in public.split() if not Reach().allows(address)] == []
    assert [address for address in special.split() if Reach().allows(address)] == []


def test_named_network_is_allowed_and_no_more() -> None:
    reach = Reach(networks=(ipaddress.ip_network("10.1.0.0/16"), ipaddress.ip_network("::1/128")))
    assert all(reach.allows(address) for address in ("10.1.2.3", "::ffff:10.1.2.3", "::1"))
    assert not any(reach.allows(address) for address in ("10.2.0.1", "127.0.0.1"))


def test_odd_number_is_no_host_and_a_name_or_plain_address_is() -> None:
    for host in (
        "2130706433",
        "0x7f000001",
        "0x7f.1",
        "127.1",
        "0177.0.0.1",
        "127.0.0.1.",
        "1.2.3",
        "08.8.8.8",
    ):
        with pytest.raises(MediaRefused, match="unusual form"):
            Reach().check_name(host)
    for host in ("8.8.8.8", "::1", "example.com", "3com.com", "1.2.3.4.example"):
        Reach().check_name(host)


def test_only_named_hosts_where_some_are_named() -> None:
    reach = Reach(hosts=("a.example", "*.B.example"))
    for host in ("a.example", "A.Example.", "x.b.example", "x.y.b.example"):
        reach.check_name(host)
    for host in ("x.a.example", "b.example", "evilb.example", "8.8.8.8"):
        with pytest.raises(MediaRefused, match="not among those"):
            reach.check_name(host)
