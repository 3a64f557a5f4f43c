"""`weft models`, `weft presets`, `weft topologies`: the names that other commands take."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from weft.cli.case_options import Json
from weft.cli.output import print_json, progress, show_table
from weft.core.models.catalog import load_model, model_names
from weft.core.topology import PRESETS as TOPOLOGIES
from weft.sim.presets import PRESETS


def models_command(
    name: Annotated[str, typer.Argument(metavar="[NAME]", help="List the tensors of one model (or config.json).")] = "",
    as_json: Json = False,
) -> None:
    """List the model catalog, or the exact tensors of one model's checkpoint."""
    if name:
        tensors = [(t.name, t.dtype, list(t.shape), t.policy) for t in load_model(name).tensors]
        keys = ("name", "dtype", "shape", "policy")
        show_table(f"{name}: {len(tensors)} checkpoint tensors", keys, tensors, as_json=as_json)
        return
    with progress() as on_progress:
        rows = []
        for known in model_names():
            on_progress(known)
            model = load_model(known)
            rows.append((known, model.family, len(model.tensors), round(model.num_params / 1e9, 3)))
    show_table("models", ("name", "family", "tensors", "params_b"), rows, as_json=as_json)


def presets_command(as_json: Json = False) -> None:
    """List the published runs that can be planned and simulated by name."""
    if as_json:
        print_json([asdict(preset) for preset in PRESETS.values()])
        return
    rows = [
        (p.name, p.model, f"{p.trainer} → {p.num_replicas} × {p.engine}", p.published_range, p.system)
        for p in PRESETS.values()
    ]
    show_table("published runs", ("name", "model", "layouts", "published_s", "system"), rows, as_json=False)


def topologies_command(as_json: Json = False) -> None:
    """List the cluster presets."""
    rows = [
        (
            cluster.name,
            cluster.host.devices,
            sum(nic.gbps for nic in cluster.host.nics) / cluster.host.devices,
            cluster.host.link_gb_per_s,
            cluster.host.domain_hosts,
        )
        for cluster in TOPOLOGIES.values()
    ]
    keys = ("name", "devices_per_host", "network_gbps_per_device", "link_gb_per_s", "hosts_per_domain")
    show_table("topologies", keys, rows, as_json=as_json)
