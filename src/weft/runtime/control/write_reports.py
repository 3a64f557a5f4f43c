"""What was written on links, as columns: a trainer reports hundreds of links at once, for every version.

The controller checks the columns of a trainer, and gives every engine rank those of its own links, without looking at
links one by one.

    reports = WriteReports.of([WriteReport(peer=3, num_bytes=64, digest=5)])
    [report.num_bytes for report in reports]                                    # [64]
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import msgspec
import numpy as np

from weft.errors import ProtocolError

DTYPES: Mapping[str, str] = {"peers": "<i8", "num_bytes": "<i8", "digests": "<u8", "seconds": "<f8"}
"""The columns, and what they consist of."""


class WriteReport(NamedTuple):
    """What was written on one link."""

    peer: int
    """The rank at the other end: an engine rank where a trainer reports, a trainer where an engine rank is told."""
    num_bytes: int
    digest: int
    sizes: tuple[int, ...] = ()
    """Bytes of the patch of each chunk, where patches are sent."""
    seconds: float = 0.0
    """From the first write until the last had ended."""


class WriteReports(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, kw_only=True, gc=False):
    """What was written on the links of one member, in the order of the ranks at their other ends."""

    peers: bytes = b""
    num_bytes: bytes = b""
    digests: bytes = b""
    seconds: bytes = b""
    sizes: dict[int, tuple[int, ...]] = {}
    """The sizes of patches, by peer, where patches are sent."""

    @classmethod
    def of(cls, reports: Iterable[WriteReport]) -> WriteReports:
        """Links as columns."""
        ordered = sorted(reports)
        return cls.packed(
            {
                "peers": [each.peer for each in ordered],
                "num_bytes": [each.num_bytes for each in ordered],
                "digests": [each.digest for each in ordered],
                "seconds": [each.seconds for each in ordered],
            },
            {each.peer: each.sizes for each in ordered if each.sizes},
        )

    @classmethod
    def packed(cls, columns: Mapping[str, Any], sizes: dict[int, tuple[int, ...]]) -> WriteReports:
        """Columns as bytes."""
        data = {name: np.asarray(columns[name], dtype=dtype).tobytes() for name, dtype in DTYPES.items()}
        return cls(**data, sizes=sizes)

    def __len__(self) -> int:
        return len(self.peers) // 8

    def check(self) -> None:
        """Raise ProtocolError unless every column has a number for each link."""
        sizes = len(self.peers), len(self.num_bytes), len(self.digests), len(self.seconds)
        if sizes != (8 * len(self),) * len(sizes):
            raise ProtocolError(f"columns of {sizes} bytes were reported for {len(self)} links")

    def without(self, peers: Container[int]) -> WriteReports:
        """All links but those to some peers."""
        return type(self).of(each for each in self if each.peer not in peers)

    def __iter__(self) -> Iterator[WriteReport]:
        self.check()
        columns = [np.frombuffer(getattr(self, name), dtype=dtype).tolist() for name, dtype in DTYPES.items()]
        for peer, num_bytes, digest, seconds in zip(*columns, strict=True):
            yield WriteReport(peer, num_bytes, digest, self.sizes.get(peer, ()), seconds)
