"""What vLLM's own loaders copy is what weft declares: every family of the catalog, every rank, element by element.

    test process       shrinks a catalog model, materialises both recipes and compares them
    child              builds vLLM's model of one rank on meta tensors and traces its loader

Every element of the checkpoint has a number. An engine tensor is an array of these numbers, with -1 where nothing is
written: two recipes are equal if their arrays are. Heads, KV heads and the widths of feed-forward layers, which layouts
cut, are the published ones; the rest is smaller. The child has no peers: torch's fake backend lets it be any rank of
any world.

Where weft's declaration is known to differ from vLLM, the difference is listed exactly.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.processes import Failure, Process
from weft.core.geometry.scaling import scale_shape
from weft.core.layout import Tensor
from weft.core.layouts.engine_layout import EngineMesh, engine_recipe, parse_engine
from weft.core.models.catalog import build_model, model_names
from weft.core.models.configs import CONFIGS
from weft.core.models.model import Model
from weft.core.recipe import Op, Piece, Recipe

pytestmark = [
    pytest.mark.engines,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]

TRACE_S = 120.0
"""For the child to import vLLM and answer; a quiet machine needs a tenth."""
ENVIRONMENT = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}

ARCHITECTURES = {
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "glm4": "Glm4ForCausalLM",
    "glm4_moe": "Glm4MoeForCausalLM",
    "glm4_moe_lite": "Glm4MoeLiteForCausalLM",
    "glm_moe_dsa": "GlmMoeDsaForCausalLM",
    "gpt2": "GPT2LMHeadModel",
    "kimi_k2": "DeepseekV3ForCausalLM",
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}
MIXED = ("ep2", "tp2.ep2", "tp2.dp2", "tp2.dp2.ep4")
LAYOUTS = {
    "deepseek-v3": ("tp1", "tp2", "tp16", *MIXED),
    "glm-4.5-air": ("tp1", "tp2", "tp16", *MIXED),
    "glm-4.7-flash": ("tp1", "tp2", "tp4", *MIXED),
    "glm-5": ("tp1", "tp2", "tp16", *MIXED),
    "glm-z1-9b": ("tp1", "tp2", "tp4"),
    "gpt2": ("tp1", "tp2", "tp4"),
    "kimi-k2": ("tp1", "tp2", "tp16", *MIXED),
    "llama-3.1-8b": ("tp1", "tp2", "tp16"),
    "moonlight-16b-a3b": ("tp1", "tp2", "tp4", *MIXED),
    "qwen2.5-72b": ("tp1", "tp2", "tp16"),
    "qwen3-0.6b": ("tp1", "tp2", "tp16"),
    "qwen3-30b-a3b": ("tp1", "tp2", "tp8", *MIXED),
}
"""The last of the `tp` has more ranks than the model has KV heads, where it has fewer of them than heads."""
FP8_LAYOUTS = {
    "deepseek-v3": ("tp1", "tp2", "ep2", "tp2.ep2"),
    "glm-4.7-flash": ("tp1", "tp2", "ep2"),
    "glm-z1-9b": ("tp1",),
    "kimi-k2": ("tp2.ep2",),
    "llama-3.1-8b": ("tp1", "tp2"),
    "moonlight-16b-a3b": ("tp1", "ep2"),
    "qwen3-0.6b": ("tp1", "tp2"),
    "qwen3-30b-a3b": ("tp1", "tp2", "ep2", "tp2.ep2"),
}

SIZES = {
    "vocab_size": 1000,  # padded to 1024
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "n_layer": 2,
    "first_k_dense_replace": 1,
    "num_experts": 9,  # not the same number on every rank
    "n_routed_experts": 9,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "index_n_heads": 4,
}
FP8_SIZES = {"hidden_size": 256, "q_lora_rank": 128, "kv_lora_rank": 64}
"""Whole blocks."""
FP8 = {
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
    "activation_scheme": "dynamic",
    "modules_to_not_convert": [f"model.layers.{layer}.mlp.gate" for layer in range(SIZES["num_hidden_layers"])],
}
MORE_FIELDS = {
    "max_position_embeddings": 1024,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
}
"""What vLLM reads and the catalog leaves out."""

FP32_ROUTER = {"mlp.gate.weight": "fp32, declared bf16"}
"""GLM-4's, in vLLM only: the declaration is that of the published runs, whose engines (SGLang) keep it in bf16."""
FP32_ROUTERS = ("glm4_moe", "glm4_moe_lite")
WHOLE_SHARED_EXPERTS = {
    "mlp.shared_experts.gate_up_proj.weight": "other shape",
    "mlp.shared_experts.down_proj.weight": "other shape",
}
"""DeepSeek's, where tp, dp and ep are all in use: vLLM then gives each rank some of the tokens (sequence parallelism)
and the whole shared experts, with most of its all-to-all backends; weft declares them cut."""
DEEPSEEK_EXPERTS = ("deepseek_v3", "glm_moe_dsa", "kimi_k2")

_LAYER = re.compile(r"^(model\.layers|transformer\.h)\.\d+\.")
_ATTENTION_SCALE = re.compile(r"\.attn\.(q|k|v|prob)_scale$")
"""Parameters of an FP8 model for an FP8 cache; vLLM drops them if the checkpoint has none."""


def smaller(name: str, **sizes: int) -> dict[str, Any]:
    """The config of a catalog model with fewer layers, experts and rows, in bf16."""
    full = CONFIGS[name]
    family, heads = full["model_type"], full.get("num_attention_heads", 0)
    config = {**full, **{field: size for field, size in (SIZES | sizes).items() if full.get(field)}, **MORE_FIELDS}
    config |= {"torch_dtype": "bfloat16", "architectures": [ARCHITECTURES[family]]}
    config |= {"q_lora_rank": config.get("q_lora_rank")}  # without one the default is DeepSeek's
    config |= {"llama": {"head_dim": 64}, "qwen2": {"hidden_size": 2 * heads}}.get(family, {})
    return {field: value for field, value in config.items() if field not in ("quantization_config", "rope_scaling")}


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What does the loader of one rank copy?"""

    folder: Path
    mesh: EngineMesh
    rank: int
    checkpoint: tuple[Tensor, ...]


def answer_questions(pipe: Any) -> None:
    """Build and trace, as asked."""
    from weft.integrations.tracing import trace_loader  # noqa: PLC0415

    os.environ.update(ENVIRONMENT)
    _pretend()
    while (question := pipe.recv()) is not None:
        try:
            with _model_of(question) as model:
                destinations = dict(model.named_parameters(remove_duplicate=False))
                pipe.send(trace_loader(model.load_weights, question.checkpoint, destinations))
        except Exception:
            pipe.send(Failure(traceback.format_exc()))


def _pretend() -> None:
    """Let vLLM build models of one rank of many, on meta tensors, without peers and without kernels for them."""
    import torch.distributed  # noqa: PLC0415
    from vllm.distributed import parallel_state  # noqa: PLC0415
    from vllm.model_executor.layers.fused_moe import expert_map_manager  # noqa: PLC0415
    from vllm.model_executor.layers.quantization import fp8  # noqa: PLC0415
    from vllm.model_executor.models import registry  # noqa: PLC0415
    from vllm.platforms.cpu import CpuPlatform  # noqa: PLC0415

    new_group, make_group = torch.distributed.new_group, parallel_state.init_model_parallel_group
    attention, place = CpuPlatform.get_attn_backend_cls, expert_map_manager.determine_expert_map
    alone = {"use_message_queue_broadcaster": False, "use_device_communicator": False}

    def dense_attention(selected_backend: Any, attn_selector_config: Any, num_heads: int | None = None) -> str:
        return attention(selected_backend, attn_selector_config._replace(use_sparse=False), num_heads)

    def place_on_cpu(*args: Any, **options: Any) -> Any:
        with torch.device("cpu"):  # which experts are whose is looked up while loading
            return place(*args, **options)

    torch.distributed.new_group = lambda ranks, **options: new_group(ranks, **options | {"backend": "fake"})
    parallel_state.init_model_parallel_group = lambda *args, **options: make_group(*args, **options | alone)
    parallel_state._node_count = lambda group: 1
    registry._run_in_subprocess = lambda look: look()  # one more import of vLLM for every architecture
    expert_map_manager.determine_expert_map = place_on_cpu
    CpuPlatform.get_attn_backend_cls = staticmethod(dense_attention)
    fp8.init_fp8_linear_kernel = lambda **options: None
    fp8.select_fp8_moe_backend = lambda **options: (None, None)


@contextmanager
def _model_of(question: Question) -> Iterator[Any]:
    """vLLM's model of one rank, without memory."""
    import torch.distributed  # noqa: PLC0415
    from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: PLC0415
    from vllm.config import set_current_vllm_config  # noqa: PLC0415
    from vllm.distributed import parallel_state  # noqa: PLC0415
    from vllm.engine.arg_utils import EngineArgs  # noqa: PLC0415
    from vllm.model_executor.model_loader.utils import initialize_model  # noqa: PLC0415
    from vllm.utils.torch_utils import set_default_torch_dtype  # noqa: PLC0415

    mesh = question.mesh
    config = EngineArgs(
        model=str(question.folder),
        skip_tokenizer_init=True,
        load_format="dummy",
        dtype="bfloat16",
        enforce_eager=True,
        max_model_len=128,
        tensor_parallel_size=mesh.tp,
        data_parallel_size=mesh.dp,
        enable_expert_parallel=mesh.ep > 1,
    ).create_engine_config()
    data_part, tensor_part = divmod(question.rank, mesh.tp)
    config.parallel_config.rank, config.parallel_config.data_parallel_rank = tensor_part, data_part
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=question.rank, world_size=mesh.num_ranks)
    try:
        with set_current_vllm_config(config):
            parallel_state.init_distributed_environment(mesh.tp, tensor_part, local_rank=0, backend="fake")
            parallel_state.initialize_model_parallel(mesh.tp, backend="fake")
            with set_default_torch_dtype(torch.bfloat16), torch.device("meta"):
                model = initialize_model(vllm_config=config)
            assert all(parameter.is_meta for parameter in model.parameters())
            yield model
    finally:
        parallel_state.destroy_model_parallel()
        parallel_state.destroy_distributed_environment()


@pytest.fixture(scope="module")
def vllm() -> Iterator[Process]:
    """A process that imports vLLM once."""
    with ExitStack() as stack:
        yield Process.started(stack, answer_questions)


Arrays = dict[str, tuple[str, np.ndarray]]
"""Precision and elements of engine tensors."""


def numbered(tensors: Sequence[Tensor]) -> dict[str, np.ndarray]:
    """Checkpoint tensors in which no two elements have the same number."""
    ends = np.cumsum([np.prod(tensor.shape) for tensor in tensors])
    assert ends[-1] <= np.iinfo(np.int32).max
    ranges = zip(tensors, [0, *ends[:-1]], ends, strict=True)
    return {tensor.name: np.arange(lo, hi, dtype=np.int32).reshape(tensor.shape) for tensor, lo, hi in ranges}


def filled(tensors: Iterable[Tensor], pieces: Iterable[Piece], sources: Mapping[str, np.ndarray]) -> Arrays:
    """Engine tensors made of pieces; none may write what another has written."""
    made = {tensor.name: (tensor.dtype, np.full(tensor.shape, -1, np.int32)) for tensor in tensors}
    for piece in pieces:
        source, (_, array) = sources[piece.source], made[piece.dst]
        axes = piece.axes or tuple(range(len(piece.extent)))
        walked = [axis for axis in axes if axis >= 0]
        order = [*walked, *(axis for axis in range(source.ndim) if axis not in walked)]
        extent = [piece.extent[axes.index(axis)] if axis in walked else 1 for axis in range(source.ndim)]
        target, taken = array[_box(piece.dst_lo, piece.extent)], source[_box(piece.src_lo, extent)]
        assert target.shape == piece.extent
        assert (target == -1).all(), f"{piece.dst} is written twice"
        target[...] = taken.transpose(order).reshape(piece.extent)
    return made


def _box(lo: Sequence[int], extent: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(start, start + size) for start, size in zip(lo, extent, strict=True))


def declared(recipe: Recipe, rank: int, sources: Mapping[str, np.ndarray]) -> Arrays:
    """The engine tensors of one rank as weft declares them; padding stays -1."""
    engine = recipe.engine
    tensors = {row: engine.tensors[row] for row, group in enumerate(engine.group_of) if rank in engine.groups.of(group)}
    pieces = np.flatnonzero(np.isin(recipe.dst, list(tensors)) & (recipe.op != Op.PAD))
    return filled(tensors.values(), (_piece(recipe, int(i), sources) for i in pieces), sources)


def _piece(recipe: Recipe, i: int, sources: Mapping[str, np.ndarray]) -> Piece:
    """A row of the recipe; scales are checkpoint tensors of their own here, as they are for a loader."""
    tensor = recipe.engine.tensors[recipe.dst[i]]
    source = recipe.sources[recipe.src[i]] + ("_scale_inv" if recipe.op[i] == Op.SCALE else "")
    num_dims, num_source_dims = len(tensor.shape), sources[source].ndim
    return Piece(
        dst=tensor.name,
        source=source,
        dst_lo=tuple(recipe.dst_lo[i, :num_dims].tolist()),
        extent=tuple(recipe.extent[i, :num_dims].tolist()),
        src_lo=tuple(recipe.src_lo[i, :num_source_dims].tolist()),
        axes=tuple(recipe.axes[i, :num_dims].tolist()),
    )


def traced(trace: Any, sources: Mapping[str, np.ndarray]) -> Arrays:
    """The engine tensors of one rank as vLLM's loader fills them, under the names weft has for them."""
    tensors = [tensor for tensor in trace.destinations if not _ATTENTION_SCALE.search(tensor.name)]
    made = filled(tensors, trace.pieces(), sources)
    return {name.replace(".experts.routed_experts.", ".experts."): made[name] for name in made}


def differences(ours: Arrays, theirs: Arrays) -> dict[str, str]:
    """How engine tensors differ, by name without the layer."""
    found = {}
    for name in ours.keys() | theirs.keys():
        if name not in ours or name not in theirs:
            what = "only declared" if name in ours else "only traced"
        else:
            (dtype, array), (their_dtype, their_array) = ours[name], theirs[name]
            what = "" if dtype == their_dtype else f"{their_dtype}, declared {dtype}"
            if array.shape != their_array.shape:
                what += "other shape"
            elif not np.array_equal(array, their_array):
                what += "other elements"
        if what:
            found[_LAYER.sub("", name)] = what
    return found


def compare(
    vllm: Process, folder: Path, model: Model, text: str, checkpoint: tuple[Tensor, ...], *, dtype: str = "bf16"
) -> tuple[dict[str, str], set[str]]:
    """The differences on all ranks, and the checkpoint tensors that none of them takes."""
    (folder / "config.json").write_text(json.dumps(model.config))
    mesh, recipe, sources = parse_engine(text), engine_recipe(model, text, dtype=dtype), numbered(checkpoint)
    assert mesh.ep in (1, mesh.num_ranks)  # vLLM has no other
    found: dict[str, str] = {}
    unused = set(sources)
    for rank in range(mesh.num_ranks):
        vllm.ask(Question(folder=folder, mesh=mesh, rank=rank, checkpoint=checkpoint))
        trace = vllm.answer(TRACE_S)
        found |= differences(declared(recipe, rank, sources), traced(trace, sources))
        unused &= set(trace.unused)
    return found, unused


def known_differences(family: str, text: str) -> dict[str, str]:
    mesh = parse_engine(text)
    splits_tokens = min(mesh.tp, mesh.dp, mesh.ep) > 1 and family in DEEPSEEK_EXPERTS
    router = FP32_ROUTER if family in FP32_ROUTERS else {}
    return router | (WHOLE_SHARED_EXPERTS if splits_tokens else {})


def fp8_checkpoint(model: Model) -> tuple[Tensor, ...]:
    """The tensors of the model's FP8 checkpoint, without draft layers."""
    found = []
    for tensor in model.policy_tensors:
        dtype = "fp8_e4m3" if tensor.quantized else tensor.dtype
        found.append(Tensor(name=tensor.name, dtype=dtype, shape=tensor.shape))
        if tensor.quantized:
            found.append(Tensor(name=f"{tensor.name}_scale_inv", dtype="fp32", shape=scale_shape(tensor.shape)))
    return tuple(found)


def _cases(layouts: Mapping[str, Sequence[str]]) -> list[tuple[str, str]]:
    return [(name, text) for name in layouts for text in layouts[name]]


def test_every_family_of_the_catalog_is_here():
    families = {CONFIGS[name]["model_type"] for name in model_names()}
    assert families == {CONFIGS[name]["model_type"] for name in LAYOUTS} == set(ARCHITECTURES)


@pytest.mark.parametrize(("name", "text"), _cases(LAYOUTS))
def test_a_loader_copies_what_is_declared(vllm, tmp_path, name, text):
    model = build_model(name, smaller(name))
    checkpoint = tuple(tensor.tensor() for tensor in model.tensors)
    found, unused = compare(vllm, tmp_path, model, text, checkpoint)
    assert found == known_differences(model.family, text)
    assert unused == {tensor.name for tensor in model.tensors if not tensor.policy}


@pytest.mark.parametrize(("name", "text"), _cases(FP8_LAYOUTS))
def test_a_loader_of_fp8_blocks_copies_what_is_declared(vllm, tmp_path, name, text):
    model = build_model(name, smaller(name, **FP8_SIZES) | {"quantization_config": FP8})
    found, unused = compare(vllm, tmp_path, model, text, fp8_checkpoint(model), dtype="fp8-block128")
    assert found == known_differences(model.family, text)
    assert not unused


def test_fp8_keys_of_an_indexer_are_computed_from_values(vllm, tmp_path):
    """vLLM multiplies GLM-5's `wk` with its scales and keeps it in bf16: trainers can send it, FP8 files cannot."""
    model = build_model("glm-5", smaller("glm-5", **FP8_SIZES) | {"quantization_config": FP8})
    with pytest.raises(AssertionError, match="could not be followed") as refused:
        compare(vllm, tmp_path, model, "tp1", fp8_checkpoint(model), dtype="fp8-block128")
    lost = set(re.findall(r"- model\.layers\.\d+\.(\S+): goes through", str(refused.value)))
    assert lost == {"self_attn.indexer.wk.weight", "self_attn.indexer.wk.weight_scale_inv"}


def test_a_rank_may_have_nothing_but_padding(vllm, tmp_path):
    """900 rows, padded to 960, are 15 parts of 60 and one part of padding."""
    model = build_model("llama-3.1-8b", smaller("llama-3.1-8b", vocab_size=900))
    checkpoint = tuple(tensor.tensor() for tensor in model.tensors)
    assert compare(vllm, tmp_path, model, "tp16", checkpoint) == ({}, set())
