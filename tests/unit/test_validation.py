"""The rows of `weft validate` that need no large plan; the whole command runs in tests/process."""

from __future__ import annotations

from weft.core.models.catalog import load_model
from weft.sim import validation
from weft.sim.delta_size import entropy_coded_bytes, position_bits
from weft.sim.presets import PRESETS
from weft.sim.validation import ffn_share


def test_position_entropy_is_what_it_should_be():
    assert round(position_bits(0.5), 6) == 2.0
    assert round(position_bits(0.01), 2) == 8.08


def test_denser_deltas_are_larger_but_cheaper_per_change():
    sparse, dense = entropy_coded_bytes(1e9, 0.01), entropy_coded_bytes(1e9, 0.03)
    assert sparse < dense < 3 * sparse


def test_feed_forward_share_of_a_dense_model():
    assert round(ffn_share(load_model("qwen3-4b")), 1) == 66.9


def test_a_row_outside_its_tolerance_does_not_pass():
    row = validation._within("T0", "source", "quantity", 1.0, 1.2, 0.1)
    assert not row.passed
    assert row.to_json()["pass"] is False
    assert validation._within("T0", "source", "quantity", 1.0, 1.05, 0.1).passed


def test_presets_state_what_is_published_and_what_is_assumed():
    wanted = {"chen-qwen3-235b", "chen-kimi-k2", "miles-qwen3-235b", "miles-kimi-k2", "nemo-deepseek-v3"}
    assert wanted <= PRESETS.keys()
    assert all(preset.published and preset.assumed for preset in PRESETS.values())
