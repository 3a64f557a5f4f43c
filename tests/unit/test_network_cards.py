"""Network cards and their rates, from folders like those the kernel shows; and the topology made of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from weft.cli.machine_topology import detect
from weft.core.topology import cluster_from_mapping, cluster_toml
from weft.errors import ConfigError
from weft.transport.network_cards import VARIABLE, host_gbps, network_cards


def write(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(f"{text}\n")


def ethernet(sysfs: Path, name: str, speed: str, *, is_physical: bool = False, state: str = "up") -> Path:
    folder = sysfs / "net" / name
    write(folder, speed=speed, operstate=state)
    if is_physical:
        (folder / "device").mkdir()
    return folder


def rdma(sysfs: Path, name: str, rate: str, state: str = "4: ACTIVE") -> None:
    write(sysfs / "infiniband" / name / "ports" / "1", rate=rate, state=state)


@pytest.fixture(autouse=True)
def _nothing_is_given(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)


def rates(sysfs: Path) -> dict[str, float]:
    return {card.name: card.gbps for card in network_cards(sysfs)}


def test_rdma_cards_come_first_and_only_with_a_link(tmp_path):
    rdma(tmp_path, "mlx5_0", "400 Gb/sec (4X NDR)")
    rdma(tmp_path, "mlx5_1", "200 Gb/sec (4X HDR)")
    rdma(tmp_path, "mlx5_2", "10 Gb/sec", state="1: DOWN")
    ethernet(tmp_path, "eno1", "10000", is_physical=True)
    assert rates(tmp_path) == {"mlx5_0": 400.0, "mlx5_1": 200.0}
    assert host_gbps(tmp_path) == 600.0


def test_physical_cards_come_before_virtual_ones(tmp_path):
    ethernet(tmp_path, "eno1", "25000", is_physical=True)
    ethernet(tmp_path, "veth7", "10000")
    assert rates(tmp_path) == {"eno1": 25.0}


def test_virtual_cards_count_where_there_are_no_others(tmp_path):
    ethernet(tmp_path, "lo", "10000")
    ethernet(tmp_path, "eth0", "10000")
    ethernet(tmp_path, "eth1", "-1")
    ethernet(tmp_path, "eth2", "10000", state="down")
    (ethernet(tmp_path, "br0", "10000") / "bridge").mkdir()
    assert rates(tmp_path) == {"eth0": 10.0}


def test_a_host_that_says_nothing_has_no_known_rate(tmp_path):
    assert host_gbps(tmp_path) == 0.0
    with pytest.raises(ConfigError, match="reports its rate"):
        detect(None, sysfs=tmp_path, gpus=tmp_path / "none")


@pytest.mark.parametrize("given", ["fast", "-1", "0", "nan"])
def test_a_wrong_rate_is_refused(tmp_path, monkeypatch, given):
    monkeypatch.setenv(VARIABLE, given)
    with pytest.raises(ConfigError, match=VARIABLE):
        host_gbps(tmp_path)


def test_a_given_rate_is_taken_instead(tmp_path, monkeypatch):
    ethernet(tmp_path, "eth0", "10000")
    monkeypatch.setenv(VARIABLE, "0.4")
    assert host_gbps(tmp_path) == 0.4
    assert [nic.gbps for nic in detect(None, sysfs=tmp_path, gpus=tmp_path / "none").host.nics] == [0.4]


@pytest.mark.parametrize(
    ("num_cards", "num_gpus", "served"),
    [
        (8, 8, [(n,) for n in range(8)]),
        (2, 4, [(0, 1), (2, 3)]),
        (4, 2, [(0,), (0,), (1,), (1,)]),
        (3, 2, [(0, 1)] * 3),
        (1, 0, [(0,)]),
    ],
)
def test_a_host_is_described_by_its_cards_and_gpus(tmp_path, num_cards, num_gpus, served):
    for number in range(num_cards):
        rdma(tmp_path, f"mlx5_{number}", "400 Gb/sec (4X NDR)")
    for number in range(num_gpus):
        (tmp_path / "gpus" / str(number)).mkdir(parents=True)
    cluster = detect(None, sysfs=tmp_path, gpus=tmp_path / "gpus")
    assert [nic.devices for nic in cluster.host.nics] == served
    assert cluster.host.devices == max(num_gpus, 1)
    assert {nic.gbps for nic in cluster.host.nics} == {400.0}


def test_what_is_detected_can_be_read_back(tmp_path):
    import tomllib  # noqa: PLC0415

    rdma(tmp_path, "mlx5_0", "400 Gb/sec (4X NDR)")
    found = detect("h200-efa3200", sysfs=tmp_path, gpus=tmp_path / "none")
    read = cluster_from_mapping(tomllib.loads(cluster_toml(found)), where="here")
    assert read == found
    assert read.host.nics[0].efficiency == 0.864
