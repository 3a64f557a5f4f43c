"""The routing matrix as a picture: bytes from each trainer to each engine rank.

One row per trainer rank, one column per engine rank, colour by bytes; bars on the right show what each trainer sends,
bars below what each engine receives. Thin lines separate hosts. SVG, or a self-contained HTML page that shows the
value of the cell under the pointer.
"""

from __future__ import annotations

import base64
import json
import struct
import zlib
from html import escape
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from weft.core.plans.plan import Plan
from weft.errors import ConfigError

_RAMP = np.array([(247, 251, 255), (198, 219, 239), (107, 174, 214), (33, 113, 181), (8, 48, 107)], dtype=np.float64)
_EMPTY = (255, 255, 255)
_LEFT, _TOP, _BAR, _GAP = 84, 84, 120, 10
_MAX_CELLS_WITH_TEXT = 32


def write_picture(plan: Plan, path: Path) -> None:
    """Write `.svg` or `.html`, by the file's suffix."""
    if path.suffix not in (".svg", ".html"):
        raise ConfigError(f"`{path}` is neither .svg nor .html", hint="give a file that ends in one of them")
    picture = svg(plan)
    try:
        path.write_text(picture if path.suffix == ".svg" else _page(plan, picture))
    except OSError as error:
        raise ConfigError(f"`{path}` cannot be written: {error.strerror}") from error


def svg(plan: Plan) -> str:
    """The picture."""
    matrix = plan.pair_bytes
    num_rows, num_columns = matrix.shape
    cell_w, cell_h = _cell(num_columns, 760), _cell(num_rows, 760)
    width, height = num_columns * cell_w, num_rows * cell_h
    full_w, full_h = max(_LEFT + width + _GAP + _BAR + 90, 900), _TOP + height + _GAP + _BAR + 60
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{full_w}" height="{full_h}" '
        f'viewBox="0 0 {full_w} {full_h}" font-family="system-ui, sans-serif" font-size="11" fill="#222">',
        f'<rect width="{full_w}" height="{full_h}" fill="white"/>',
        *_titles(plan),
        f'<image id="cells" x="{_LEFT}" y="{_TOP}" width="{width}" height="{height}" '
        f'href="data:image/png;base64,{_png(_pixels(matrix, cell_w, cell_h))}"/>',
        f'<rect x="{_LEFT}" y="{_TOP}" width="{width}" height="{height}" fill="none" stroke="#888"/>',
        *_host_lines(plan, cell_w, cell_h, width, height),
        *_ticks(num_rows, cell_h, num_columns, cell_w, height),
        *_cell_texts(matrix, cell_w, cell_h),
        *_bars(matrix, cell_w, cell_h, width, height),
        *_legend(matrix, _LEFT + width + _GAP, _TOP + height + _GAP),
        "</svg>",
    ]
    return "\n".join(parts)


def _cell(count: int, room: int) -> int:
    return max(1, min(44, room // count))


def _titles(plan: Plan) -> list[str]:
    sent, received = plan.tx_bytes, plan.rx_bytes
    case = (
        f"{plan.trainer.num_ranks} trainer ranks ({plan.trainer.text}) → {plan.recipe.engine.num_ranks} engine ranks "
    )
    case += f"({plan.recipe.num_replicas} × {plan.recipe.engine.text})"
    facts = (
        f"{_size(plan.total_bytes)} in {plan.num_routes:,} routes · a trainer sends {_size(sent.min())} to "
        f"{_size(sent.max())} (busiest {sent.max() / max(sent.mean(), 1):.3f} × mean) · an engine receives up to "
        f"{_size(received.max())}"
    )
    return [
        f'<text x="{_LEFT}" y="24" font-size="17" font-weight="600">{escape(plan.model)}: who sends what to whom, '
        f"policy {escape(plan.policy)}</text>",
        f'<text x="{_LEFT}" y="43" font-size="12">{escape(case)}</text>',
        f'<text x="{_LEFT}" y="60" font-size="12" fill="#555">{escape(facts)}</text>',
    ]


def _pixels(matrix: NDArray[np.int64], cell_w: int, cell_h: int) -> NDArray[np.uint8]:
    """Cell colours, linear in bytes; cells without traffic are white."""
    most = max(int(matrix.max()), 1)
    position = matrix / most * (len(_RAMP) - 1)
    lower = np.minimum(position.astype(int), len(_RAMP) - 2)
    share = (position - lower)[..., None]
    colour = _RAMP[lower] * (1 - share) + _RAMP[lower + 1] * share
    colour[matrix == 0] = _EMPTY
    return np.repeat(np.repeat(colour.astype(np.uint8), cell_h, axis=0), cell_w, axis=1)


def _png(pixels: NDArray[np.uint8]) -> str:
    """An RGB image as base64 PNG."""
    height, width, _ = pixels.shape
    rows = np.concatenate([np.zeros((height, 1), np.uint8), pixels.reshape(height, -1)], axis=1)

    def part(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    image = b"\x89PNG\r\n\x1a\n" + part(b"IHDR", header) + part(b"IDAT", zlib.compress(rows.tobytes(), 9))
    return base64.b64encode(image + part(b"IEND", b"")).decode()


def _host_lines(plan: Plan, cell_w: int, cell_h: int, width: int, height: int) -> list[str]:
    topology = plan.topology
    lines = []
    for devices, step, horizontal in (
        (topology.trainer_device, cell_h, True),
        (topology.engine_device, cell_w, False),
    ):
        hosts = topology.host_of(devices)
        borders = np.flatnonzero(np.diff(hosts)) + 1
        if len(borders) * 2 > len(devices) or step * topology.host.devices < 8:
            continue
        for border in borders:
            at = int(border) * step
            ends = (
                f'x1="{_LEFT}" y1="{_TOP + at}" x2="{_LEFT + width}" y2="{_TOP + at}"'
                if horizontal
                else f'x1="{_LEFT + at}" y1="{_TOP}" x2="{_LEFT + at}" y2="{_TOP + height}"'
            )
            lines.append(f'<line {ends} stroke="#000" stroke-opacity="0.18" stroke-width="0.6"/>')
    return lines


def _ticks(num_rows: int, cell_h: int, num_columns: int, cell_w: int, height: int) -> list[str]:
    texts = []
    for rank in range(0, num_rows, _tick_step(num_rows, cell_h, 14)):
        y = _TOP + rank * cell_h + cell_h / 2 + 4
        texts.append(f'<text x="{_LEFT - 6}" y="{y}" text-anchor="end" font-size="10">{rank}</text>')
    for rank in range(0, num_columns, _tick_step(num_columns, cell_w, 26)):
        x = _LEFT + rank * cell_w + cell_w / 2
        texts.append(f'<text x="{x}" y="{_TOP - 6}" text-anchor="middle" font-size="10">{rank}</text>')
    middle = _TOP + height / 2
    texts.append(
        f'<text x="16" y="{middle}" transform="rotate(-90 16 {middle})" text-anchor="middle">trainer rank</text>'
    )
    texts.append(f'<text x="{_LEFT - 6}" y="{_TOP - 6}" text-anchor="end" fill="#555">engine rank</text>')
    return texts


def _tick_step(count: int, cell: int, room: int) -> int:
    step = 1
    while step * cell < room and step < count:
        step *= 2
    return step


def _cell_texts(matrix: NDArray[np.int64], cell_w: int, cell_h: int) -> list[str]:
    """The numbers themselves, where there is room for them."""
    if max(matrix.shape) > _MAX_CELLS_WITH_TEXT or cell_w < 34 or cell_h < 14:
        return []
    most = matrix.max()
    return [
        f'<text x="{_LEFT + c * cell_w + cell_w / 2}" y="{_TOP + r * cell_h + cell_h / 2 + 3}" text-anchor="middle" '
        f'font-size="9" fill="{"white" if matrix[r, c] > most / 2 else "#222"}">{_short(int(matrix[r, c]))}</text>'
        for r, c in zip(*np.nonzero(matrix), strict=True)
    ]


def _bars(matrix: NDArray[np.int64], cell_w: int, cell_h: int, width: int, height: int) -> list[str]:
    sent, received = matrix.sum(axis=1), matrix.sum(axis=0)
    right, below = _LEFT + width + _GAP, _TOP + height + _GAP
    parts = []
    for rank, size in enumerate(sent):
        length = _BAR * size / max(sent.max(), 1)
        bar = max(cell_h - (cell_h > 3), 1)
        parts.append(
            f'<rect x="{right}" y="{_TOP + rank * cell_h}" width="{length:.1f}" height="{bar}" fill="#6baed6"/>'
        )
    for rank, size in enumerate(received):
        length = _BAR * size / max(received.max(), 1)
        bar = max(cell_w - (cell_w > 3), 1)
        parts.append(
            f'<rect x="{_LEFT + rank * cell_w}" y="{below}" width="{bar}" height="{length:.1f}" fill="#fd8d3c"/>'
        )
    parts.append(f'<text x="{right}" y="{_TOP - 6}">sends, up to {_size(sent.max())}</text>')
    parts.append(f'<text x="{_LEFT}" y="{below + _BAR + 16}">receives, up to {_size(received.max())}</text>')
    return parts


def _legend(matrix: NDArray[np.int64], x: int, y: int) -> list[str]:
    stops = "".join(
        f'<stop offset="{i / (len(_RAMP) - 1)}" stop-color="rgb({int(r)},{int(g)},{int(b)})"/>'
        for i, (r, g, b) in enumerate(_RAMP)
    )
    return [
        f'<defs><linearGradient id="ramp">{stops}</linearGradient></defs>',
        f'<text x="{x}" y="{y + 12}">bytes per pair</text>',
        f'<rect x="{x}" y="{y + 20}" width="{_BAR}" height="10" fill="url(#ramp)" stroke="#888" stroke-width="0.5"/>',
        f'<text x="{x}" y="{y + 43}" font-size="10">0</text>',
        f'<text x="{x + _BAR}" y="{y + 43}" text-anchor="end" font-size="10">{_size(int(matrix.max()))}</text>',
    ]


def _size(num_bytes: float) -> str:
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= factor:
            return f"{num_bytes / factor:.3g} {unit}"
    return f"{int(num_bytes)} B"


def _short(num_bytes: int) -> str:
    return _size(num_bytes).replace(" ", "").replace("B", "")


def _page(plan: Plan, picture: str) -> str:
    """The picture with a read-out of the cell under the pointer."""
    num_rows, num_columns = plan.pair_bytes.shape
    data = json.dumps(plan.pair_bytes.ravel().tolist(), separators=(",", ":"))
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{escape(plan.model)}: routing matrix</title>
<style>body{{margin:16px;font-family:system-ui,sans-serif}}
#out{{position:fixed;top:8px;right:16px;background:#fff;border:1px solid #888;padding:6px 10px}}</style></head>
<body><div id="out">point at a cell</div>
{picture}
<script>
const bytes={data},rows={num_rows},columns={num_columns},image=document.getElementById("cells");
image.addEventListener("mousemove",event=>{{
  const box=image.getBoundingClientRect();
  const column=Math.min(columns-1,Math.floor((event.clientX-box.left)/box.width*columns));
  const row=Math.min(rows-1,Math.floor((event.clientY-box.top)/box.height*rows));
  const megabytes=(bytes[row*columns+column]/1e6).toFixed(3);
  document.getElementById("out").textContent=`trainer ${{row}} → engine ${{column}}: ${{megabytes}} MB`;
}});
</script></body></html>
"""
