"""A lab's hosts are hosts of their own, its NICs carry what they should and no more, and it never stays behind."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from tests.lab.programs import program
from weft.errors import ConfigError
from weft.lab import Lab, alike, load_lab, records
from weft.lab.commands import call, namespaces

pytestmark = pytest.mark.lab
RATE = "80mbit"
RATE_BYTES = 10_000_000
BURST_BYTES = 256 << 10
SIZE = 4_000_000
WAIT_S = 60.0


def moved(lab: Lab, src: int, dst: int, num_bytes: int = SIZE) -> float:
    """Seconds for bytes from one host to another."""
    with program(lab, dst, "receive", str(num_bytes)) as receiver:
        assert receiver.stdout.readline() == "listening\n"
        with program(lab, src, "send", lab.address(dst), str(num_bytes)) as sender:
            assert sender.wait(WAIT_S) == 0
        left, seconds = receiver.communicate(timeout=WAIT_S)[0].split()
    assert left == "0"
    return float(seconds)


def rates(lab: Lab, host: int) -> str:
    """What the kernel says about a host's first NIC."""
    return call("tc", "-n", f"weft-{lab.name}-h{host}", "qdisc", "show", "dev", "eth0")


def test_nics_carry_bytes_at_their_rate_at_most_and_count_them():
    with Lab(alike(hosts=3, nic=RATE)) as lab:
        assert moved(lab, 0, 1) > (SIZE - BURST_BYTES) / RATE_BYTES
        found = {(each.host, each.nic): each for each in lab.traffic()}
        assert SIZE < found[0, 0].sent_bytes < 1.1 * SIZE
        assert SIZE < found[1, 0].received_bytes < 1.1 * SIZE
        assert found[2, 0].sent_bytes + found[2, 0].received_bytes < SIZE / 100


def test_a_slow_host_is_slow_until_it_is_healed():
    with Lab(alike(hosts=2, nic="8gbit")) as lab:
        lab.slow(1, RATE)
        assert moved(lab, 0, 1) > (SIZE - BURST_BYTES) / RATE_BYTES
        assert "rate 80Mbit" in rates(lab, 1)
        lab.heal(1)
        assert "rate 8Gbit" in rates(lab, 1)
        moved(lab, 0, 1)


def test_the_uplink_of_a_rack_is_shared(tmp_path):
    file = tmp_path / "lab.toml"
    file.write_text(f'nic = "8gbit"\n[[host]]\ncount = 2\n[[host]]\nrack = "far"\n[rack.far]\nuplink = "{RATE}"\n')
    with Lab(load_lab(file)) as lab:
        assert moved(lab, 0, 2) > (SIZE - BURST_BYTES) / RATE_BYTES
        moved(lab, 0, 1)


def test_tcp_shares_a_nic_alike_on_every_machine():
    with Lab(alike(hosts=2, nic=RATE)) as lab, program(lab, 1, "receive", "1") as receiver:
        assert receiver.stdout.readline() == "listening\n"
        with program(lab, 0, "send", lab.address(1), "1") as sender:
            assert sender.communicate(timeout=WAIT_S)[0] == "reno\n"


def test_a_host_that_is_cut_off_hears_nothing_until_it_is_healed():
    with Lab(alike(hosts=2, nic=RATE)) as lab, program(lab, 1, "receive", str(SIZE)) as receiver:
        assert receiver.stdout.readline() == "listening\n"
        lab.cut(1)
        with program(lab, 0, "send", lab.address(1), str(SIZE)) as sender:
            with pytest.raises(subprocess.TimeoutExpired):
                sender.wait(1.5)
            assert receiver.poll() is None
            lab.heal(1)
            assert sender.wait(WAIT_S) == 0
        assert receiver.communicate(timeout=WAIT_S)[0].split()[0] == "0"


def test_every_host_is_a_host_of_its_own():
    with Lab(alike(hosts=2, nic=RATE)) as lab:
        places = []
        for host in range(2):
            with program(lab, host, "place") as process:
                places.append(process.communicate(timeout=WAIT_S)[0].split())
    assert len({boot for boot, _ in places}) == 2
    assert [name for _, name in places] == [f"{lab.name}-h{host}" for host in range(2)]


def test_two_labs_do_not_meet():
    with Lab(alike(hosts=2, nic=RATE)) as one, Lab(alike(hosts=2, nic=RATE)) as other:
        assert one.address(1) == other.address(1)
        moved(one, 0, 1, num_bytes=100_000)
        assert {each.sent_bytes > 50_000 for each in other.traffic()} == {False}
        with pytest.raises(ConfigError, match="is running"), Lab(alike(hosts=1, nic=RATE), one.name):
            pass


def test_what_a_killed_lab_leaves_is_removed_by_the_next():
    code = (
        "import sys, time; from weft.lab import Lab, alike\n"
        "with Lab(alike(hosts=2, nic='80mbit')) as lab:\n"
        "    sleeping = lab.start(0, ['sleep', '600'])\n"
        "    print(lab.name, sleeping.pid, flush=True)\n"
        "    time.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout is not None
        name, sleeping = launcher.stdout.readline().split()
        assert any(name in namespace for namespace in namespaces())
        launcher.kill()
    with Lab(alike(hosts=1, nic=RATE)):
        assert not any(name in namespace for namespace in namespaces())
        assert name not in [record.name for record in records.all_labs()]
    deadline = time.monotonic() + WAIT_S
    while os.path.exists(f"/proc/{sleeping}") and time.monotonic() < deadline:  # not yet reaped
        time.sleep(0.05)
    assert not os.path.exists(f"/proc/{sleeping}")
    assert not list(records.FOLDER.glob(f"{name}.*"))


def test_without_root_it_is_refused_with_a_hint():
    command = ["setpriv", "--reuid", "65534", "--clear-groups", sys.executable, "-c"]
    code = "from weft.lab import *\ntry: Lab(alike(hosts=1, nic='1gbit'))\nexcept Exception as e: print(e, e.hint)"
    done = subprocess.run([*command, code], capture_output=True, text=True, timeout=WAIT_S, check=False)
    if "ModuleNotFoundError" in done.stderr or "Permission denied" in done.stderr:
        pytest.skip("other users cannot read this checkout")
    assert "labs need root" in done.stdout
    assert "sudo" in done.stdout
