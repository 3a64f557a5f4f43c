"""A virtual cluster on one Linux machine: hosts are network namespaces, their NICs are rate-limited virtual cards.

    spec = alike(hosts=4, nic="400mbit")
    with Lab(spec) as lab:
        process = lab.start(0, ["iperf3", "-s"])
        lab.cut(2)
        lab.traffic()

`spec` describes a lab, `commands` calls `ip` and `tc`, `network` makes namespaces, cards and bridges, `records` knows
the labs of this machine, `lab` puts them together, `running` runs one command on every host.
"""

from weft.lab.lab import Lab
from weft.lab.spec import LabSpec, alike, load_lab, parse_rate

__all__ = ["Lab", "LabSpec", "alike", "load_lab", "parse_rate"]
