"""Covers of all pairs: what a cross of many options finds, in a fraction of its tests."""

import itertools
from collections.abc import Sequence
from typing import Any

import pytest


def pairwise(*axes: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Return rows of the product of `axes` in which all values of any two axes meet.

    With 4 axes of 3 values 9 or 10 rows suffice, of 81.
    """
    every = list(itertools.product(*map(range, map(len, axes))))
    missing, rows = set[Any]().union(*map(_pairs, every)), []
    while missing:
        row = max(every, key=lambda row: len(missing.intersection(_pairs(row))))
        missing -= _pairs(row)
        rows.append(tuple(axis[index] for axis, index in zip(axes, row, strict=True)))
    return rows


def _pairs(row: tuple[int, ...]) -> set[Any]:
    return set(itertools.combinations(enumerate(row), min(2, len(row))))


def cover(cases: Sequence[set[Any]], most: int) -> list[int]:
    """Return the indices of at most `most` cases, each the one with most values not seen before."""
    rest, chosen, seen = [*range(len(cases))], list[int](), set[Any]()
    while rest and len(chosen) < most:
        chosen.append(max(rest, key=lambda index: len(cases[index] - seen)))
        rest.remove(chosen[-1])
        seen |= cases[chosen[-1]]
    return chosen


def crossed(*axes: Sequence[Any]) -> list[Any]:
    """Return the product of `axes` as parameters; those outside a pairwise cover are `soak`."""
    quick = pairwise(*axes)
    soak = [row for row in itertools.product(*axes) if row not in quick]
    return [*quick, *(pytest.param(*row, marks=pytest.mark.soak) for row in soak)]


def soak(*values: Any) -> Any:
    """Return the parameters of a case that the quick suite leaves out."""
    return pytest.param(*values, marks=pytest.mark.soak)
