"""All links of a version, as trainers reported them: one row for each trainer and engine rank.

links = WrittenLinks.joined([WrittenLinks.of(0, reports_of_trainer_0), WrittenLinks.of(1, reports_of_trainer_1)])
links.total_bytes
links.by_engine([0, 1])             # engine rank → WriteReports, for its Verify
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft.runtime.control.write_reports import DTYPES, WriteReports
from weft.runtime.controller.admission import MAX_SECONDS

Int64s = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenLinks:
    """Columns; the same row of each belongs to the same link."""

    trainer: Int64s
    engine: Int64s
    num_bytes: Int64s
    digest: NDArray[np.uint64]
    seconds: NDArray[np.float64]
    sizes: Mapping[tuple[int, int], tuple[int, ...]]
    """Trainer and engine rank → bytes of the patch of each chunk, where patches were sent."""

    @classmethod
    def of(cls, reported: Sequence[tuple[int, WriteReports]]) -> WrittenLinks:
        """What trainers reported, with the rank of each. Raises ProtocolError if columns differ in length."""
        for _, reports in reported:
            reports.check()
        seconds = _joined("seconds", reported)
        return cls(
            trainer=np.repeat([trainer for trainer, _ in reported], [len(reports) for _, reports in reported]),
            engine=_joined("peers", reported),
            num_bytes=_joined("num_bytes", reported),
            digest=_joined("digests", reported),
            seconds=np.where((seconds >= 0) & (seconds < MAX_SECONDS), seconds, 0.0),
            sizes={
                (trainer, engine): of_chunks
                for trainer, reports in reported
                for engine, of_chunks in reports.sizes.items()
            },
        )

    @property
    def total_bytes(self) -> int:
        """Bytes on all links."""
        return int(self.num_bytes.sum())

    def by_engine(self, engines: Sequence[int]) -> dict[int, WriteReports]:
        """What was written to each of some engine ranks."""
        order = np.lexsort((self.trainer, self.engine))
        borders = np.searchsorted(self.engine[order], [(engine, engine + 1) for engine in engines]).tolist()
        sizes: dict[int, dict[int, tuple[int, ...]]] = defaultdict(dict)
        for (trainer, engine), of_chunks in self.sizes.items():
            sizes[engine][trainer] = of_chunks
        return {
            engine: WriteReports.packed(self._told(order[slice(*border)]), sizes.get(engine, {}))
            for engine, border in zip(engines, borders, strict=True)
        }

    def _told(self, rows: Int64s) -> dict[str, NDArray[Any]]:
        """What an engine rank is told of its links."""
        return {
            "peers": self.trainer[rows],
            "num_bytes": self.num_bytes[rows],
            "digests": self.digest[rows],
            "seconds": self.seconds[rows],
        }


def _joined(name: str, reported: Sequence[tuple[int, WriteReports]]) -> NDArray[Any]:
    """One column of all trainers."""
    return np.frombuffer(b"".join(getattr(reports, name) for _, reports in reported), dtype=DTYPES[name])
