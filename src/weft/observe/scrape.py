"""Reading a controller's metrics back from the address it serves them on."""

from __future__ import annotations

import urllib.error
import urllib.request
from dataclasses import dataclass, field

from weft.errors import ConfigError

TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class Scrape:
    """Metrics at one moment."""

    plain: dict[str, float] = field(default_factory=dict)
    """Those without labels."""
    labelled: dict[str, dict[str, float]] = field(default_factory=dict)
    """Those with one, by its value."""


def scrape(address: str) -> Scrape:
    """Ask for the metrics. Raises ConfigError if there is nothing to be had there."""
    try:
        from prometheus_client.parser import text_string_to_metric_families  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise ConfigError("metrics need prometheus-client", hint="pip install 'weft[metrics]'") from error
    if not address.startswith(("http://", "https://")):
        raise ConfigError(f"`{address}` is not an address of metrics", hint="as in http://127.0.0.1:9464/metrics")
    try:
        with urllib.request.urlopen(address, timeout=TIMEOUT_S) as answer:
            families = list(text_string_to_metric_families(answer.read().decode()))
    except (OSError, ValueError) as error:
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        raise ConfigError(
            f"`{address}` has no metrics: {reason}", hint="start the controller with --metrics HOST:PORT"
        ) from error
    found = Scrape()
    for sample in (sample for family in families for sample in family.samples):
        if sample.labels:
            found.labelled.setdefault(sample.name, {})[next(iter(sample.labels.values()))] = sample.value
        else:
            found.plain[sample.name] = sample.value
    if "weft_versions_committed_total" not in found.plain:
        raise ConfigError(f"`{address}` has no metrics of weft", hint="start the controller with --metrics HOST:PORT")
    return found
