"""A controller's metrics for Prometheus, made from a snapshot whenever they are asked for.

    with serve_metrics("127.0.0.1:9464", snapshot) as address:     # needs weft[metrics]
        ...                                                        # curl http://127.0.0.1:9464/metrics

`snapshot` returns the fields of the controller's statistics. `docs/grafana.json` is a dashboard of these metrics.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from weft.errors import ConfigError

END_S = 5.0
Snapshot = Callable[[], Mapping[str, Any]]
_COUNTERS = {
    "weft_versions_committed": ("num_committed", "Versions that were committed."),
    "weft_versions_aborted": ("num_aborted", "Versions that were aborted."),
    "weft_plans": ("num_plans", "Plans that were made."),
    "weft_heartbeats": ("num_beats", "Heartbeats of members."),
}
_GAUGES = {
    "weft_version": ("committed", "The last version that was committed."),
    "weft_version_seconds": ("last_version_s", "How long the last version took, from publish to committed."),
    "weft_version_wire_bytes": ("last_wire_bytes", "What the last version moved."),
    "weft_version_magnitude_bytes": ("last_magnitude_bytes", "FP8 magnitudes trainers exchanged for it."),
    "weft_plan_bytes": ("bytes_per_version", "What a whole version moves, as planned."),
    "weft_plan_writes": ("writes_per_version", "One-sided writes of a whole version, as planned."),
    "weft_plan_seconds": ("plan_s", "How long the plan took to make."),
}
_LABELLED = {
    "weft_members": ("side", "Members that have joined."),
    "weft_members_lost": ("member", "Members that were lost and have not returned."),
    "weft_links": ("transport", "Links between trainers and engine ranks."),
    "weft_host_speed": ("members", "What a slow host carries of what it reports, compared with the others."),
}
NAMES = (*(f"{name}_total" for name in _COUNTERS), *_GAUGES, *_LABELLED)
"""Everything that is exported."""


class ControllerMetrics:
    """A collector in the sense of prometheus_client."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot

    def collect(self) -> Iterator[Any]:
        """All metrics, as they are now."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily  # noqa: PLC0415 - an extra

        now = self._snapshot()
        for name, (key, text) in _COUNTERS.items():
            yield CounterMetricFamily(name, text, value=now[key])
        for name, (key, text) in _GAUGES.items():
            yield GaugeMetricFamily(name, text, value=now[key] or 0)
        for name, (label, text) in _LABELLED.items():
            family = GaugeMetricFamily(name, text, labels=[label])
            for value, number in _labelled(now, name).items():
                family.add_metric([value], number)
            yield family


def _labelled(now: Mapping[str, Any], name: str) -> Mapping[str, float]:
    """Values of a metric by its label."""
    if name == "weft_members":
        sides = Counter(member.partition(" ")[0] for member in now["members"])
        return {side: sides[side] for side in ("trainer", "engine")}
    if name == "weft_members_lost":
        return dict.fromkeys(now["lost"], 1)
    return {str(key): float(value) for key, value in now["links" if name == "weft_links" else "slow_hosts"].items()}


@contextlib.contextmanager
def serve_metrics(bind: str, snapshot: Snapshot) -> Iterator[str]:
    """Serve them over HTTP on `HOST:PORT`; yields the address."""
    try:
        from prometheus_client import CollectorRegistry, start_http_server  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise ConfigError("metrics need prometheus-client", hint="pip install 'weft[metrics]'") from error
    host, _, port = bind.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise ConfigError(f"metrics cannot be served on `{bind}`", hint="give HOST:PORT, as in 127.0.0.1:9464")
    registry = CollectorRegistry()
    registry.register(ControllerMetrics(snapshot))
    try:
        server, thread = start_http_server(int(port), addr=host, registry=registry)
    except OSError as error:
        raise ConfigError(f"metrics cannot be served on `{bind}`: {error.strerror}") from error
    try:
        yield f"http://{host}:{server.server_port}/metrics"
    finally:
        server.shutdown()
        server.server_close()
        thread.join(END_S)
