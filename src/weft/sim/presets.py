"""Published runs as ready-made cases: what the authors state, and what had to be assumed.

    weft plan chen-qwen3-235b        weft simulate miles-kimi-k2        weft presets

A preset is a model, two layouts and a cluster. `weft simulate PRESET` predicts what weft does with it; `weft validate`
predicts what the original system did and compares with `published_s`.
"""

from __future__ import annotations

from dataclasses import dataclass

from weft.core.case import Case


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """One published run."""

    name: str
    model: str
    trainer: str
    engine: str
    num_replicas: int
    dtype: str
    topology: str
    system: str
    published_s: tuple[float, float]
    """Range of published times, seconds."""
    published: str
    """What the source states."""
    assumed: str
    """What it does not state and weft assumes."""
    offloaded: bool = False
    """Whether the trainer's weights start in host memory."""

    @property
    def published_range(self) -> str:
        """The published seconds as text."""
        low, high = self.published_s
        return f"{low:g}" if low == high else f"{low:g}–{high:g}"

    def case(self, *, policy: str = "balanced", gather: str = "none") -> Case:
        """The planning case of this run."""
        return Case(
            model=self.model,
            trainer=self.trainer,
            engine=self.engine,
            num_replicas=self.num_replicas,
            dtype=self.dtype,
            topology=self.topology,
            policy=policy,
            gather=gather,
        )


def _chen(
    name: str,
    model: str,
    trainer: str,
    engine: str,
    replicas: int,
    seconds: tuple[float, float],
    published: str,
    assumed: str,
) -> Preset:
    return Preset(
        name=name,
        model=model,
        trainer=trainer,
        engine=engine,
        num_replicas=replicas,
        dtype="fp8-block128",
        topology="h200-efa3200",
        system="Perplexity / Chen (full_tensor + RDMA write)",
        published_s=seconds,
        published=published,
        assumed=assumed,
        offloaded=True,
    )


def _miles(
    name: str,
    model: str,
    trainer: str,
    engine: str,
    replicas: int,
    p2p_ms: float,
    published: str,
    *,
    dtype: str = "bf16",
    assumed: str = "",
) -> Preset:
    return Preset(
        name=name,
        model=model,
        trainer=trainer,
        engine=engine,
        num_replicas=replicas,
        dtype=dtype,
        topology="h100-ib400",
        system="LMSYS / miles P2P (CPU replica + RDMA write)",
        published_s=(p2p_ms / 1e3, p2p_ms / 1e3),
        published=published + "; mean of steps 3–12",
        assumed=assumed or "data-parallel size fills the stated nodes",
    )


_LIST = (
    _chen(
        "chen-qwen3-235b",
        "qwen3-235b-a22b",
        "fsdp16.ep8/hsdp16x8",
        "ep8",
        4,
        (1.69, 1.70),
        "128 trainer GPUs BF16 → 32 rollout GPUs FP8, 400 Gb/s per GPU, 37.688 GB received per rollout GPU, "
        "8.987–11.476 GB sent per trainer GPU, 1.69–1.70 s",
        "8-GPU nodes (H200, 2×200G EFA per GPU); experts EP8 inside a node and FSDP across the 16 nodes, everything "
        "else FSDP inside a node and replicated across nodes; 4 engine replicas of EP8; weights offloaded to host",
    ),
    _chen(
        "chen-kimi-k2",
        "kimi-k2",
        "pp2.fsdp16.ep8/hsdp16x8",
        "ep32",
        4,
        (1.233, 1.233),
        "256 trainer GPUs BF16 (FSDP16, PP2, EP8) → 128 rollout GPUs FP8 EP32, 974 full_tensor calls and 1144 writes "
        "per rank, 1233 ms in all",
        "8-GPU nodes (H200, 2×200G EFA per GPU); experts EP8 inside a node and FSDP across 16 nodes, everything else "
        "FSDP inside a node and replicated across nodes; engine attention and vocabulary replicated; weights offloaded",
    ),
    _chen(
        "chen-kimi-k2-pairs",
        "kimi-k2",
        "pp2.ep8.fsdp16/hsdp16x8",
        "ep32",
        4,
        (1.233, 1.233),
        "as chen-kimi-k2",
        "as chen-kimi-k2, but the FSDP16 shards of an expert on two neighbouring nodes (EP8 across node pairs)",
    ),
    _miles(
        "miles-glm-z1-9b",
        "glm-z1-9b",
        "tp2.cp2.dp2",
        "tp4",
        2,
        707.1,
        "TP2 CP2, 1 node → TP4, 1 node; P2P 707.1 ms, NCCL 694.6 ms",
        assumed="dp2 trainer, two TP4 engines fill the nodes; TP4 repeats the 2 KV heads",
    ),
    _miles(
        "miles-moonlight-16b",
        "moonlight-16b-a3b",
        "tp2.ep8",
        "tp8.ep8",
        1,
        1073.3,
        "TP2 EP8, 1 node → TP8 EP8, 1 node; P2P 1073.3 ms, NCCL 1482.0 ms",
    ),
    _miles(
        "miles-glm-4.7-flash",
        "glm-4.7-flash",
        "tp4.ep8",
        "tp4.ep4",
        2,
        4229.0,
        "TP4 EP8, 1 node → TP4 EP4, 1 node; P2P 4229.0 ms, NCCL 2508.6 ms",
        assumed="two TP4 engines fill the node",
    ),
    _miles(
        "miles-glm-5-4layer",
        "glm-5-4layer",
        "tp4.ep8",
        "tp8.ep8",
        1,
        1260.8,
        "TP4 EP8, 1 node → TP8 EP8, 1 node; P2P 1260.8 ms, NCCL 732.2 ms",
        assumed="GLM-5 cut to its first 4 layers (3 dense, 1 MoE)",
    ),
    _miles(
        "miles-qwen3-30b",
        "qwen3-30b-a3b",
        "tp4.dp4.ep8",
        "tp8.ep8",
        2,
        2160.2,
        "TP4 EP8, 2 nodes → TP8 EP8, 2 nodes; P2P 2160.2 ms, NCCL 2670.0 ms",
    ),
    _miles(
        "miles-glm-4.5-air",
        "glm-4.5-air",
        "pp4.ep8",
        "tp8.ep8",
        4,
        2637.2,
        "TP1 PP4 EP8, 4 nodes → TP8 EP8, 4 nodes; P2P 2637.2 ms, NCCL 5001.1 ms",
    ),
    _miles(
        "miles-qwen3-235b",
        "qwen3-235b-a22b",
        "tp4.pp4.cp2.ep16",
        "tp32.ep32",
        2,
        3162.0,
        "TP4 PP4 CP2 EP16, 8 nodes → TP32 EP32, 8 nodes; P2P 3162.0 ms, NCCL 10753.6 ms",
    ),
    _miles(
        "miles-glm-5",
        "glm-5",
        "tp4.pp8.cp2.ep16",
        "dp64.ep64",
        2,
        8479.7,
        "TP4 PP8 CP2 EP16, 16 nodes → TP64 EP64 dp64, 16 nodes; P2P 8479.7 ms, NCCL 58301.5 ms",
    ),
    _miles(
        "miles-kimi-k2",
        "kimi-k2",
        "tp8.pp8.cp4.ep32",
        "tp4.dp8.ep32",
        8,
        7227.3,
        "TP8 PP8 CP4 EP32, 32 nodes → TP32 EP32 dp8, 32 nodes; P2P 7227.3 ms incl. about 884 ms post-load, "
        "NCCL 53279.1 ms",
        dtype="fp8-block128",
    ),
    Preset(
        name="rdt-kimi-k2",
        model="kimi-k2",
        trainer="tp8.dp4.pp8.ep32",
        engine="tp32.ep32",
        num_replicas=4,
        dtype="bf16",
        topology="h100-ib400",
        system="vLLM sharded_rdt (RDMA read)",
        published_s=(7.53, 7.53),
        published="32 train nodes TP8 PP8 EP32 → 16 inference nodes TP32 EP32, 400G, 7.9 TB in 7.53 s; the authors' "
        "limits: 1.25 s, 5 s with pipeline stages one after the other",
        assumed="4 engines",
    ),
    Preset(
        name="nemo-deepseek-v3",
        model="deepseek-v3",
        trainer="pp16.ep16",
        engine="tp32",
        num_replicas=8,
        dtype="bf16",
        topology="h100-ib400",
        system="NeMo-RL nccl_reshard",
        published_s=(2.39, 2.83),
        published="256 H100 PP16×EP16 BF16 → 256 H100 TP32×DP8, 2.39–2.83 s",
        assumed="TP1, expert data parallel 1; 8 engines of TP32 with experts cut by TP",
    ),
    Preset(
        name="rlwb-qwen2.5-0.5b",
        model="qwen2.5-0.5b",
        trainer="ddp8",
        engine="tp1",
        num_replicas=8,
        dtype="bf16",
        topology="h100-ib400",
        system="rl-weight-broadcast (UCCL P2P)",
        published_s=(0.055, 0.055),
        published="8 trainers DDP → 8 inference GPUs, 0.055 s, 39.49 GB/s aggregate",
        assumed="400 Gb/s NICs (the cards are not stated; time and bandwidth published do not agree with each other)",
    ),
)

PRESETS: dict[str, Preset] = {preset.name: preset for preset in _LIST}
