from __future__ import annotations

import pytest

from weft.config import (
    SPARE_BYTES,
    DigestPolicy,
    EngineSettings,
    ReceiverMode,
    Settings,
    TransferSettings,
    load_settings,
)
from weft.errors import ConfigError


def test_file_then_environment(tmp_path):
    path = tmp_path / "weft.toml"
    path.write_text("[weft]\nchunk_bytes = 1048576\nmin_write_bytes = 4096\n")
    env = {"WEFT_MIN_WRITE_BYTES": "8192", "WEFT_DELTA": "on", "WEFT_PATCH_SHARE": "0.1", "WEFT_KEYS": "not of plans"}
    expected = {"chunk_bytes": 1 << 20, "min_write_bytes": 8192, "delta": "on", "patch_share": 0.1}
    assert load_settings(Settings, path, env) == Settings(**expected)
    assert load_settings(TransferSettings, path, env) == TransferSettings(**expected)
    assert load_settings(Settings, path, env, given={"min_write_bytes": 1}) == Settings(
        **expected | {"min_write_bytes": 1}
    )


def test_one_file_serves_plans_and_controllers(tmp_path):
    path = tmp_path / "weft.toml"
    path.write_text('[weft]\nmode = "in_place"\nsilence_s = 9\nallow_nonfinite = true\n')
    assert load_settings(Settings, path, {}) == Settings(mode="in_place")
    wanted = TransferSettings(mode="in_place", silence_s=9.0, allow_nonfinite=True)
    assert load_settings(TransferSettings, path, {}) == wanted
    assert wanted.planned == Settings(mode="in_place")


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({"WEFT_CHUNK_BYTES": "big"}, "chunk_bytes is 'big'"),
        ({"WEFT_CHUNK_BYTES": "1"}, "chunk_bytes is 1"),
        ({"WEFT_STAGING_BYTES": "65536"}, "staging_bytes is 65536"),
        ({"WEFT_PATCH_SHARE": "half"}, "patch_share is 'half'"),
        ({"WEFT_ALLOW_NONFINITE": "perhaps"}, "allow_nonfinite is 'perhaps'"),
        ({"WEFT_MODE": "sideways"}, "unknown mode `sideways`"),
    ],
)
def test_bad_values_are_named(env, message):
    with pytest.raises(ConfigError, match=message):
        load_settings(TransferSettings, None, env)


def test_unknown_settings_are_named(tmp_path):
    path = tmp_path / "weft.toml"
    path.write_text("[weft]\nbucket_size = 3\n")
    with pytest.raises(ConfigError, match="unknown setting `bucket_size`"):
        load_settings(Settings, path, {})


def test_transfer_settings_take_names_and_refuse_what_cannot_be():
    assert TransferSettings(mode="in_place", digest="off") == TransferSettings(
        mode=ReceiverMode.IN_PLACE, digest=DigestPolicy.OFF
    )
    for wrong, told in [
        ({"mode": "sideways"}, "unknown mode"),
        ({"digest": "maybe"}, "unknown digest"),
        ({"silence_s": 0.5}, "two heartbeats"),
        ({"version_s": 0.0}, "version_s"),
        ({"num_threads": 0}, "num_threads"),
        ({"delta": "perhaps"}, "unknown delta"),
        ({"mode": "patch"}, "mode `patch` without delta"),
        ({"compression": "zstd"}, "compression without delta"),
        ({"delta": "on", "compression": "zip"}, "unknown compression"),
        ({"delta": "on", "anchor_every": 0}, "anchor_every is 0"),
    ]:
        with pytest.raises(ConfigError, match=told):
            TransferSettings(**wrong)


def test_what_an_engine_reserves():
    """The bound of a mode, a size, or nothing."""
    weights, window = 1 << 30, 256 << 20
    for reserve, expected in [
        ("none", 0),
        ("shadow", int(1.05 * weights) + SPARE_BYTES),
        ("patch", int(0.05 * weights) + SPARE_BYTES + window),
        ("in_place", int(0.05 * weights) + SPARE_BYTES + window),
        ("20GiB", 20 << 30),
        ("1.5 GB", 1_500_000_000),
        ("4096", 4096),
    ]:
        assert abs(EngineSettings(reserve=reserve).reserved_bytes(weights, "cpu") - expected) <= 1
    for wrong in ("much", "3 acres", "-1GB", ""):
        with pytest.raises(ConfigError, match="is not a size"):
            EngineSettings(reserve=wrong)


@pytest.mark.parametrize(
    ("num_members", "silence_s", "expected"),
    [(2, 5.0, 0.5), (100, 5.0, 0.5), (200, 5.0, 1.0), (384, 5.0, 1.25), (384, 38.4, 1.92), (10_000, 1.0, 0.5)],
)
def test_heartbeats_of_many_members_are_rarer(num_members, silence_s, expected):
    assert TransferSettings(silence_s=silence_s).paced(num_members).beat_s == pytest.approx(expected)
