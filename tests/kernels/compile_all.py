"""Compile all kernels for Hopper and print which of them read memory in vectors.

A process of its own, because Triton either interprets kernels or compiles them.
"""

from __future__ import annotations

import json
import re
import sys
from typing import Any

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from weft.codec.delta import BLOCK, DENSE, GROUPS, HEADER_BYTES
from weft.codec.gpu import apply_kernels, cast_kernels, fp8_kernels, kept_kernels, patch_kernels, row_kernels
from weft.gpu import walking

HOPPER = GPUTarget("cuda", 90, 32)
TABLE = {"table": "*i64"}
IMAGE = {"image": "i64"}


def kernels() -> list[tuple[str, Any, dict[str, str], dict[str, Any], int]]:
    """Name, kernel, types of its arguments, constants, warps."""
    walk = dict.fromkeys(("planes", "tiles", "keys", "sums"), "*i64")
    walk_sizes = {"TILE": walking.TILE_UNITS, "STEP": walking.STEP_UNITS}
    quantize = {**TABLE, **IMAGE, "amax": "*fp32", "wild": "*i32"}
    rows = {"ROWS": fp8_kernels.QUANTIZE_ROWS, "PART_ROWS": fp8_kernels.PART_ROWS, "IS_ALIGNED": True}
    found: list[tuple[str, Any, dict[str, str], dict[str, Any], int]] = [
        (
            "walk",
            walking._walk_kernel,
            walk,
            {"IS_COPIED": copied, "IS_DIGESTED": digested, **walk_sizes},
            walking.WARPS,
        )
        for copied, digested in ((True, False), (False, True), (True, True))
    ]
    for element, cast, wild in ((tl.bfloat16, True, False), (tl.float32, False, True)):
        constants = {"ELEMENT": element, **rows, "HAS_CAST": cast, "IS_WILD": wild}
        found.append(("quantize", fp8_kernels._quantize_kernel, quantize, constants, fp8_kernels.QUANTIZE_WARPS))
        by_row = {"ELEMENT": element, "STEP": row_kernels.STEP, "IS_ALIGNED": True, "HAS_CAST": cast, "IS_WILD": wild}
        found.append(("quantize rows", row_kernels._quantize_row_kernel, quantize, by_row, row_kernels.WARPS))
    amax = {**TABLE, "amax": "*i32", "wild": "*i32"}
    found.append(("amax", fp8_kernels._amax_kernel, amax, {"ELEMENT": tl.bfloat16, "ROWS": 16}, 8))
    by_row = {"ELEMENT": tl.bfloat16, "STEP": row_kernels.STEP}
    found.append(("amax of rows", row_kernels._row_amax_kernel, amax, by_row, row_kernels.WARPS))
    scale = {**TABLE, "num_scales": "i32", **IMAGE, "amax": "*fp32"}
    found.append(("scale", fp8_kernels._scale_kernel, scale, {"SCALES": fp8_kernels.SCALES}, 4))
    for source, target in ((tl.float32, tl.bfloat16), (tl.bfloat16, tl.float16)):
        constants = {"FROM": source, "TO": target, "ROWS": cast_kernels.ROWS, "IS_ALIGNED": True}
        found.append(("cast", cast_kernels._cast_kernel, {**TABLE, **IMAGE}, constants, cast_kernels.WARPS))
    return found + patch_kernels_of(1) + patch_kernels_of(2) + patch_kernels_of(4)


def patch_kernels_of(width: int) -> list[tuple[str, Any, dict[str, str], dict[str, Any], int]]:
    """Kernels for elements of one width."""
    element = {1: tl.uint8, 2: tl.int16, 4: tl.int32}[width]
    encode = {**dict.fromkeys(("sections", "section_of", "state"), "*i64"), "scratch": "*i32"}
    sizes: dict[str, Any] = {
        "ELEMENT": element,
        "WIDTH": width,
        "WORDS": patch_kernels.WORDS,
        "TILE": patch_kernels.ENCODE_TILE,
        "DENSE": DENSE,
        "HEADER": HEADER_BYTES,
        "IS_ALIGNED": True,
    }
    update = {
        **dict.fromkeys(("sections", "blocks", "sources", "pieces", "state"), "*i64"),
        **{"scratch": "*i32", "entries": "*i64", "undo": "*u8", "undo_used": "*i64", "undo_bytes": "i64"},
    }
    updated = {name: constant for name, constant in sizes.items() if name != "IS_ALIGNED"}
    restore = {**dict.fromkeys(("images", "entries"), "*i64"), "undo": "*u8"}
    opened = dict.fromkeys(("blocks", "section_of", "places", "opened"), "*i64")
    rows = dict.fromkeys(("first_row", "num_rows", "row_begin", "row_address"), "*i64")
    groups = {"WIDTH": width, "GROUPS": GROUPS, "HEADER": HEADER_BYTES}
    finish = {"sections": "*i64", "state": "*i64", **dict.fromkeys(("width_and_magic", "base", "version"), "i64")}
    opening = dict.fromkeys(("images", "places", "sections", "found", "ends"), "*i64")
    return [
        ("encode", patch_kernels._encode_kernel, encode, sizes, patch_kernels.ENCODE_WARPS),
        *(
            (
                name,
                patch_kernels._update_kernel,
                update,
                {**updated, "IS_GATHERED": gathered},
                patch_kernels.ENCODE_WARPS,
            )
            for name, gathered in (("update", False), ("gather", True))
        ),
        (
            "restore",
            kept_kernels._restore_kernel,
            restore,
            {"ELEMENT": element, "LANES": kept_kernels.RESTORE_LANES},
            kept_kernels.RESTORE_WARPS,
        ),
        ("check", apply_kernels._check_kernel, {**opened, "flags": "*i64"}, groups, 1),
        ("apply", apply_kernels._apply_kernel, {**opened, **rows}, {**groups, "SLOTS": 8, "ELEMENT": element}, 4),
        ("finish", patch_kernels._finish_kernel, finish, {"BLOCK": BLOCK, "HEADER": HEADER_BYTES}, 4),
        ("open", apply_kernels._open_kernel, opening, {"HEADER": HEADER_BYTES}, 1),
    ]


def compiled(kernel: Any, types: dict[str, str], constants: dict[str, Any], warps: int) -> str:
    """PTX, made as for arguments that are aligned."""
    signature = {**types, **dict.fromkeys(constants, "constexpr")}
    aligned = {
        (number,): [["tt.divisibility", 16]]
        for number, (name, kind) in enumerate(signature.items())
        if kind.startswith("*") or name == "image"
    }
    source = ASTSource(kernel, signature, constants, aligned)
    return str(triton.compile(source, target=HOPPER, options={"num_warps": warps}).asm["ptx"])


def main() -> None:
    found: dict[str, dict[str, bool]] = {}
    for name, kernel, types, constants, warps in kernels():
        ptx = compiled(kernel, types, constants, warps)
        vectors = bool(re.search(r"ld\.global\.(v4\.b32|v2\.b64)", ptx))
        found[name] = {"vectors": vectors and found.get(name, {}).get("vectors", True)}
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
