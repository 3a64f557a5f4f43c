from __future__ import annotations

import json
from dataclasses import replace

import pytest

from weft.core.case import Case, plan_case
from weft.core.models.catalog import load_model
from weft.errors import ConfigError, LayoutError

CASE = Case(model="gpt2", trainer="fsdp2", engine="tp1", dtype="fp32")


@pytest.fixture(scope="module")
def tensors():
    return load_model("gpt2").policy_tensors


def halves(tensors):
    """Explicit shards: the first half of every tensor's rows on rank 0, the rest on rank 1."""
    shards = []
    for tensor in tensors:
        rows = -(-tensor.shape[0] // 2)
        for rank, (lo, extent) in enumerate(((0, rows), (rows, tensor.shape[0] - rows))):
            rest = list(tensor.shape[1:])
            shards.append(
                {"tensor": tensor.name, "rank": rank, "lo": [lo, *[0] * len(rest)], "extent": [extent, *rest]}
            )
    return shards


def write(path, content):
    path.write_text(json.dumps(content))
    return str(path)


def identity(tensors):
    """An engine that holds the checkpoint as it is, as a traced loader would describe it."""
    strides = {t.name: (t.shape[1], 1) if len(t.shape) == 2 else (1,) for t in tensors}
    return {
        "tensors": [{"name": t.name, "dtype": t.dtype, "shape": t.shape} for t in tensors],
        "pieces": [
            {
                "dst": t.name,
                "source": t.name,
                "shape": t.shape,
                "dst_offset": 0,
                "dst_strides": strides[t.name],
                "src_offset": 0,
                "src_strides": strides[t.name],
            }
            for t in tensors
        ],
    }


def test_explicit_shards_equal_the_text_that_means_the_same(tmp_path, tensors):
    path = write(tmp_path / "shards.json", {"shards": halves(tensors)})
    explicit = plan_case(replace(CASE, trainer=path))
    assert explicit.pair_bytes.tolist() == plan_case(CASE).pair_bytes.tolist()


def test_traced_pieces_as_an_engine(tmp_path, tensors):
    path = write(tmp_path / "pieces.json", {"ranks": [identity(tensors)]})
    plan = plan_case(replace(CASE, engine=path, num_replicas=3))
    assert plan.topology.num_engines == 3
    assert plan.rx_bytes.tolist() == [4 * 124_439_808] * 3


def test_overlapping_and_missing_shards(tmp_path, tensors):
    shards = halves(tensors)
    with pytest.raises(LayoutError, match="elements are missing"):
        plan_case(replace(CASE, trainer=write(tmp_path / "missing.json", {"shards": shards[1:]})))
    shards[1]["lo"][0] -= 1
    with pytest.raises(LayoutError, match="overlap"):
        plan_case(replace(CASE, trainer=write(tmp_path / "overlap.json", {"shards": shards})))


@pytest.mark.parametrize(
    "content",
    [
        "[]",
        "{",
        '{"shards": [{"tensor": "x"}]}',
        '{"shards": [{"tensor": 3, "rank": 0, "lo": [0], "extent": [1]}]}',
        '{"pieces": []}',
    ],
)
def test_files_of_another_form_are_refused(tmp_path, content):
    path = tmp_path / "bad.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match=r"bad\.json"):
        plan_case(replace(CASE, trainer=str(path)))
    with pytest.raises(ConfigError, match=r"bad\.json"):
        plan_case(replace(CASE, engine=str(path)))


def test_unknown_sources_and_missing_files(tmp_path, tensors):
    engine = identity(tensors)
    engine["pieces"][0]["source"] = "nothing"
    with pytest.raises(LayoutError, match="missing: nothing"):
        plan_case(replace(CASE, engine=write(tmp_path / "pieces.json", {"ranks": [engine]})))
    with pytest.raises(ConfigError, match="cannot be read"):
        plan_case(replace(CASE, trainer=str(tmp_path / "none.json")))


def test_a_file_cannot_be_gathered(tmp_path, tensors):
    path = write(tmp_path / "shards.json", {"shards": halves(tensors)})
    with pytest.raises(ConfigError, match="cannot be gathered"):
        plan_case(replace(CASE, trainer=path, policy="rank0"))
