"""All pools together: allocated, moved and told of by what each spec says of its own."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import model
from pools import CONVS, HIDDEN, HISTORY, KV, random_like, recurrent
from pools import SIZES as POOL_SIZES

from jaxspec.cache import (
    MEMORY_LABELS,
    CacheOptions,
    Moves,
    PoolSizes,
    Replay,
    Snapshot,
    allocate,
    copy,
    holders,
    namespaced,
    pools_of,
    with_pools_of,
)

SIZES = PoolSizes(num_pages=6, page_size=2, num_slots=5, width=4)
FLOAT32 = jnp.dtype("float32")
POLICIES = pytest.mark.parametrize("policy", [Snapshot(), Replay(window=7)])


def specs_of(fixture, policy):
    return model(fixture).cache_specs(CacheOptions(FLOAT32, FLOAT32, FLOAT32, policy))


@POLICIES
@pytest.mark.parametrize("fixture", ["qwen3", "qwen3_5"])
def test_the_parts_that_people_are_told_of_are_all_there_is(fixture, policy):
    specs = specs_of(fixture, policy)
    pools = jax.eval_shape(lambda: allocate(specs, SIZES))
    parts = holders(specs, pools)
    assert set(parts) <= set(MEMORY_LABELS)
    assert len(jax.tree.leaves(parts)) == len(jax.tree.leaves(pools))


@POLICIES
def test_equal_specs_are_one_program(policy):
    """A program is compiled for its specs: they are compared, and hashed, by what they say."""
    first, second = specs_of("qwen3_5", policy), specs_of("qwen3_5", policy)
    assert first == second and hash(first) == hash(second)
    assert first != specs_of("qwen3_5", Replay(window=8))


@POLICIES
def test_moves_copy_slots_and_pages_and_padding_copies_nothing(policy):
    specs, rng = specs_of("qwen3_5", policy), np.random.default_rng(0)
    pools = jax.tree.map(
        lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype), allocate(specs, SIZES)
    )
    kv, pool = np.array(pools["kv"]), pools["recurrent"]
    conv, states = np.array(pool.conv), np.array(pool.states)
    for source, target, source_page, target_page in [(1, 3, 2, 5), (1, 4, 0, 0)]:
        states[:, target], conv[:, target] = states[:, source], conv[:, source]
        if target_page:
            kv[:, :, target_page] = kv[:, :, source_page]
    index = ([1, 1, 0], [3, 4, 0], [2, 0, 0], [5, 0, 0])
    moved = copy(specs, pools, Moves(*[jnp.array(x, jnp.int32) for x in index]))
    np.testing.assert_array_equal(moved["kv"], kv)
    np.testing.assert_array_equal(moved["recurrent"].conv, conv)
    np.testing.assert_array_equal(moved["recurrent"].states, states)
    # Behind a chunk of prompt a ring is empty: nothing of it is needed.
    chex.assert_trees_all_equal(moved["recurrent"].ring, pool.ring)


SPECS = {
    "kv": KV,
    "tokens": HISTORY,
    "hidden_states": HIDDEN,
    "short_conv": CONVS,
    "recurrent": recurrent(Replay(window=8)),
}


def test_two_models_keep_pools_of_one_kind_apart():
    (theirs,) = namespaced("draft", [KV])
    assert (theirs.name, theirs.layers) == ("draft/kv", KV.layers) and theirs != KV
    pools = {"kv": 1, "draft/kv": 2}
    assert pools_of("draft", pools) == {"kv": 2}
    assert with_pools_of("draft", pools, {"kv": 3}) == {"kv": 1, "draft/kv": 3}


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_a_pool_in_a_namespace_differs_by_its_names_alone(spec):
    (theirs,) = namespaced("draft", [spec])
    assert theirs.name == f"draft/{spec.name}"
    pool = random_like(spec.allocate(POOL_SIZES), 0)
    assert jax.tree.structure(theirs.allocate(POOL_SIZES)) == jax.tree.structure(pool)
    parts = jax.tree.map(id, spec.holders(pool))
    renamed = {f"draft/{name}": part for name, part in parts.items()}
    assert jax.tree.map(id, theirs.holders(pool)) == renamed
    moves = Moves(*(jnp.array([i], jnp.int32) for i in (1, 3, 1, 2)))
    copied = jax.tree.leaves(spec.copy(pool, moves))
    for ours, other in zip(copied, jax.tree.leaves(theirs.copy(pool, moves)), strict=True):
        np.testing.assert_array_equal(ours, other)
