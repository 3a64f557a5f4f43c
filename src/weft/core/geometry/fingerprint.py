"""64-bit fingerprints of rows of columns: equal rows of two tables have equal fingerprints, in any order."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

Keys = NDArray[np.uint64]
Ints = NDArray[Any]


def name_keys(names: Iterable[str]) -> Keys:
    """A fingerprint of each name."""
    digests = (hashlib.blake2b(name.encode(), digest_size=8).digest() for name in names)
    return np.frombuffer(b"".join(digests), dtype="<u8")


def mix(keys: Keys, *columns: NDArray[Any]) -> Keys:
    """Fingerprints of rows that have these values in addition to those of `keys`: one round of SplitMix64 each."""
    for column in columns:
        for values in column.T if column.ndim == 2 else (column,):
            mixed = keys + values.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
            mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            keys = mixed ^ (mixed >> np.uint64(31))
    return keys


def distinct_rows(table: Ints) -> tuple[Ints, Ints]:
    """The different rows of a table, and which of them each row is.

    Rows are compared by a 64-bit mixture of their numbers first, which is much faster than sorting them whole.
    """
    mixed = np.zeros(len(table), dtype=np.uint64)
    for column in range(table.shape[1]):
        mixed = (mixed ^ table[:, column].astype(np.uint64)) * np.uint64(0x9E3779B97F4A7C15)
        mixed ^= mixed >> np.uint64(29)
    _, first, number = np.unique(mixed, return_index=True, return_inverse=True)
    if not (table[first][number] == table).all():  # two rows with one mixture
        distinct, exact = np.unique(table, axis=0, return_inverse=True)
        return distinct, exact.reshape(-1)
    return table[first], number


def distinct(numbers: Ints, count: int) -> Ints:
    """The different ones of these numbers from 0 to `count` - 1, in ascending order."""
    is_there = np.zeros(count, dtype=bool)
    is_there[numbers] = True
    return np.flatnonzero(is_there)


def by_appearance(numbers: Ints) -> tuple[Ints, Ints]:
    """Where each different number appears first, and all numbers again, counted in that order."""
    _, first, number = np.unique(numbers, return_index=True, return_inverse=True)
    order = np.argsort(first)
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    return first[order], place[number]
