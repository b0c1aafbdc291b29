"""work_list: every choice of an expert that there is stands in one tile, and in one alone."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxspec.pallas.moe.route import Choices
from jaxspec.pallas.moe.work_list import max_tiles, work_list

# Tokens, parts of each, experts, rows of a tile.
SHAPES = [(1, 1, 1, 1), (3, 2, 6, 2), (5, 4, 3, 8), (40, 3, 9, 8), (16, 2, 257, 16)]


@functools.cache
def compiled(num_experts, rows):
    return jax.jit(lambda experts: work_list(_choices(experts), num_experts, rows))


def _choices(experts):
    return Choices(experts, jnp.ones(experts.shape, jnp.float32))


def check(experts, num_experts, rows):
    """The tiles against the definition; the number of those with work."""
    work = jax.tree.map(np.asarray, compiled(num_experts, rows)(experts))
    flat, count = experts.ravel(), int(work.count)
    held = np.bincount(flat, minlength=num_experts + 1)[:num_experts]
    assert count == sum(-(-n // rows) for n in held)
    assert work.choices.shape == (max_tiles(flat.size, num_experts, rows), rows)
    assert work.rows == rows and work.expert.dtype == work.choices.dtype == np.int32
    assert ((work.expert >= 0) & (work.expert < num_experts)).all()  # also where nothing is read
    assert (np.diff(work.expert[:count]) >= 0).all()
    assert (work.choices[count:] == -1).all()
    listed = [at for tile in work.choices[:count] for at in tile[tile >= 0]]
    assert sorted(listed) == np.flatnonzero(flat < num_experts).tolist()
    for expert, tile in zip(work.expert[:count], work.choices[:count], strict=True):
        real = tile[tile >= 0]
        assert len(real) and (tile[: len(real)] == real).all()  # the empty places come last
        assert (flat[real] == expert).all() and (np.diff(real) > 0).all()
    return count


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@given(seed=st.integers(0, 2**32 - 1), spread=st.integers(1, 257), padding=st.floats(0, 1))
def test_every_choice_is_in_one_tile_of_its_expert(shape, seed, spread, padding):
    """`spread`: experts among which the tokens choose."""
    tokens, parts, num_experts, rows = shape
    rng = np.random.default_rng(seed)
    experts = rng.integers(0, min(spread, num_experts), (tokens, parts))
    experts[rng.random(tokens) < padding] = num_experts
    check(experts.astype(np.int32), num_experts, rows)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_nothing_but_padding_is_no_work(shape):
    tokens, parts, num_experts, rows = shape
    assert check(np.full((tokens, parts), num_experts, np.int32), num_experts, rows) == 0


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_most_tiles_that_may_be_needed_are_there(shape):
    """One choice of each expert, as far as they go, and the rest of the first."""
    tokens, parts, num_experts, rows = shape
    choices = np.arange(tokens * parts)
    experts = np.where(choices < num_experts, choices, 0).astype(np.int32)
    count = check(experts.reshape(tokens, parts), num_experts, rows)
    assert count == max_tiles(tokens * parts, num_experts, rows)


def test_the_example_of_the_docstring():
    experts = np.int32([[3, 5], [3, 4], [5, 3]])
    work = jax.tree.map(np.asarray, compiled(6, 2)(experts))
    assert int(work.count) == 4 and work.expert[:4].tolist() == [3, 3, 4, 5]
    assert work.choices[:4].tolist() == [[0, 2], [5, -1], [3, -1], [1, 4]]
    assert max_tiles(9, 256, 8) == 9 and max_tiles(2304, 257, 16) == 384
