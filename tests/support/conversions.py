"""Grids and boxes that are converted, one by one instead of as columns."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from weft.codec.conversion import Conversion, Conversions
from weft.codec.grids import SCALINGS, GridBoxes, HeldGrid, HeldGrids


def grids_of(grids: Sequence[HeldGrid]) -> HeldGrids:
    """All of them as columns."""
    boxes = [(number, box) for number, grid in enumerate(grids) for box in grid.boxes]
    return HeldGrids(
        names=[grid.name for grid in grids],
        size=np.array([(grid.grid.rows, grid.grid.columns) for grid in grids]).reshape(-1, 2),
        scaling=np.array([SCALINGS.index(grid.grid.scaling) for grid in grids]),
        group=np.array([grid.group for grid in grids]),
        first_key=np.array([grid.first_key for grid in grids]),
        boxes=GridBoxes(
            grid=np.array([number for number, _ in boxes]),
            address=np.array([box.address for _, box in boxes]),
            stride=np.array([box.stride for _, box in boxes]),
            width=np.array([box.width for _, box in boxes]),
            first=np.array([box.first for _, box in boxes]).reshape(-1, 2),
            extent=np.array([(box.rows, box.columns) for _, box in boxes]).reshape(-1, 2),
        ),
    )


def conversions_of(found: Sequence[tuple[Conversion, int]]) -> Conversions:
    """Boxes and their places as columns."""
    table = np.array([box for box, _ in found], dtype=np.int64).reshape(-1, len(Conversion._fields))
    return Conversions(table=table, at=np.array([place for _, place in found], dtype=np.int64))
