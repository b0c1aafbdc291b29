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
SHAPES = [
    (1, 1, 1, 1),
    (3, 2, 6, 2),
    (5, 3, 3, 8),
    (40, 3, 9, 8),
    (16, 2, 257, 16),
    (300, 2, 5, 16),
]


@functools.cache
def compiled(num_experts, rows):
    return jax.jit(lambda experts: _with_choices(work_list(_choices(experts), num_experts, rows)))


def _with_choices(work):
    return work, work.choices


def _choices(experts):
    return Choices(experts, jnp.ones(experts.shape, jnp.float32))


def check(experts, num_experts, rows):
    """The tiles against the definition; the number of those with work."""
    work, choices = jax.tree.map(np.asarray, compiled(num_experts, rows)(experts))
    flat, used = experts.ravel(), int((work.count > 0).sum())
    held = np.bincount(flat, minlength=num_experts + 1)
    assert used == sum(-(-n // rows) for n in held)
    assert choices.shape == (max_tiles(flat.size, num_experts + 1, rows), rows)
    assert work.expert.dtype == work.count.dtype == work.place.dtype == choices.dtype == np.int32
    assert (work.count[used:] == 0).all() and (work.expert[used:] > num_experts).all()
    assert (np.diff(work.expert) >= 0).all()
    assert sorted(choices[choices >= 0]) == list(range(flat.size))
    for expert, count, tile in zip(work.expert, work.count, choices, strict=True):
        real = tile[:count]
        assert (tile[count:] == -1).all()  # the empty places come last
        assert (flat[real] == expert).all() and (np.diff(real) > 0).all()
    assert (choices.ravel()[work.place].ravel() == np.arange(flat.size)).all()
    return used


@pytest.mark.few(2)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@given(
    seed=st.integers(0, 2**32 - 1),
    spread=st.integers(1, 257),
    padding=st.floats(0, 1),
    gaps=st.sampled_from([0, 0.5]),
)
def test_every_choice_is_in_one_tile_of_its_expert(shape, seed, spread, padding, gaps):
    """`spread`: experts that the tokens choose among; `gaps`: choices of other devices' experts."""
    tokens, parts, num_experts, rows = shape
    rng = np.random.default_rng(seed)
    among = min(max(spread, parts), num_experts)
    experts = np.stack([rng.permutation(among)[:parts] for _ in range(tokens)])
    experts[rng.random(tokens) < padding] = num_experts
    experts[rng.random(experts.shape) < gaps] = num_experts
    check(experts.astype(np.int32), num_experts, rows)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_padding_is_listed_behind_the_experts(shape):
    tokens, parts, num_experts, rows = shape
    used = check(np.full((tokens, parts), num_experts, np.int32), num_experts, rows)
    assert used == -(-tokens * parts // rows)


def test_the_most_tiles_that_may_be_needed_are_there():
    """Each expert and padding have a choice, and one expert has all others."""
    experts = np.int32([[0, 1], [0, 2], [0, 3], [0, 4], [0, 1], [5, 5]])
    assert check(experts, 5, 4) == 7 <= max_tiles(12, 6, 4) == 7


def test_the_example_of_the_docstring():
    experts = np.int32([[3, 5], [3, 4], [5, 3]])
    work, choices = jax.tree.map(np.asarray, compiled(6, 2)(experts))
    assert work.expert[:4].tolist() == [3, 3, 4, 5] and work.count[:4].tolist() == [2, 1, 1, 2]
    assert choices[:4].tolist() == [[0, 2], [5, -1], [3, -1], [1, 4]]
    assert work.place.tolist() == [[0, 6], [1, 4], [7, 2]]
    assert max_tiles(9, 256, 8) == 9 and max_tiles(2304, 257, 16) == 384


def test_no_tokens_make_no_tiles():
    work = work_list(Choices(jnp.zeros((0, 2), jnp.int32), jnp.zeros((0, 2))), 4, 8)
    assert work.expert.shape == (0,) and work.place.shape == (0, 2)
    assert work.choices.shape == (0, 8)
