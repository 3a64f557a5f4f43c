"""What labs look like: rates, files, and what is wrong with them."""

from __future__ import annotations

import pytest

from weft.errors import ConfigError
from weft.lab.spec import LabHost, alike, load_lab, parse_rate


@pytest.mark.parametrize(
    ("text", "rate"), [("400mbit", 400_000_000), ("1gbit", 10**9), ("2.5Gbit", 2_500_000_000), ("64kbit", 64_000)]
)
def test_rates(text, rate):
    assert parse_rate(text) == rate


@pytest.mark.parametrize("text", ["", "400", "400mb", "-1mbit", "0mbit", "1kbit2"])
def test_what_is_no_rate_is_an_error(text):
    with pytest.raises(ConfigError, match="is not a rate"):
        parse_rate(text)


def test_hosts_that_are_alike():
    spec = alike(hosts=3, nic="1gbit", nics=2)
    assert spec.hosts == (LabHost(rates=(10**9, 10**9)),) * 3
    assert spec.num_rails == 2


def test_a_file_of_unlike_hosts(tmp_path):
    file = tmp_path / "lab.toml"
    file.write_text(
        """
        nic = "400mbit"
        nics = 2
        [[host]]
        count = 2
        rack = "a"
        [[host]]
        nic = "40mbit"
        nics = 1
        [rack.a]
        uplink = "1gbit"
        """
    )
    spec = load_lab(file)
    assert spec.hosts == (*(LabHost(rates=(400_000_000,) * 2, rack="a"),) * 2, LabHost(rates=(40_000_000,)))
    assert spec.uplinks == {"a": 10**9}


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("nic = ", "is not TOML"),
        ('speed = "1gbit"', "unknown entry `speed`"),
        ('nic = "1gbit"', "has 0 hosts"),
        ("[[host]]\ncount = 1", "has no rate"),
        ('nic = "1gbit"\n[[host]]\ncount = 65', "`count` is 65"),
        ('nic = "1gbit"\n[[host]]\nnics = 5', "has 5 NICs"),
        ('nic = "1gbit"\n[[host]]\nspeed = 1', "unknown entry"),
        ('nic = "1gbit"\n[[host]]\nrack = "a"', "unknown rack `a`"),
        ('nic = "1gbit"\n[[host]]\n[rack.a]\nrate = "1gbit"', "must say its uplink"),
        ('nic = "fast"\n[[host]]', "`fast` is not a rate"),
    ],
)
def test_what_is_wrong_in_a_file_is_said(tmp_path, text, complaint):
    file = tmp_path / "lab.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=complaint):
        load_lab(file)


def test_a_file_that_does_not_exist_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        load_lab(tmp_path / "no.toml")
