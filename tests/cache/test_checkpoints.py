"""What each kind of pool keeps of a row, and what another row finds of it."""

import jax.numpy as jnp
import numpy as np
import pytest
from pools import CONVS, HIDDEN, HISTORY, KV, SIZES, Strange, StrangePages, random_like, recurrent

from jaxspec.cache import (
    Replay,
    SavedState,
    Snapshot,
    allocate,
    allocate_checkpoints,
    by_slot,
    export,
    namespaced,
    restore,
    unknown,
)
from jaxspec.regions import DecodeRegion


def one_row(slot, offset=0):
    one = [jnp.array([value], jnp.int32) for value in (slot, 6, 1, offset, 0)]
    return DecodeRegion(*one)


def test_what_lies_in_pages_needs_no_checkpoint():
    specs = (KV, HISTORY, HIDDEN, *namespaced("draft", [KV]))
    assert by_slot(specs) == [] and unknown(specs) == []
    assert allocate_checkpoints(specs, SIZES, 5) == {}


def test_a_pool_of_an_unknown_kind_is_named():
    class Paged(Strange):
        page_axis = 0

    for known in (Paged("strange", 1), StrangePages("strange", 1)):
        assert unknown([known, *namespaced("draft", [known])]) == []
    strange = Strange("strange", 1)
    specs = [KV, strange, recurrent(), CONVS, *namespaced("draft", [strange])]
    assert unknown(specs) == ["strange", "draft/strange"]


@pytest.mark.parametrize("policy", [Snapshot(), Replay(window=8)], ids=["snapshot", "replay"])
@pytest.mark.parametrize("owner", [None, "draft"])
def test_a_row_finds_in_its_slot_what_was_kept_of_another(policy, owner):
    """One state and all inputs of the convolution; nobody else's slot is touched."""
    specs = [recurrent(policy), CONVS, KV]
    specs = specs if owner is None else namespaced(owner, specs)
    prefix = "" if owner is None else f"{owner}/"
    pools = random_like(allocate(specs, SIZES), 0)
    checkpoints = allocate_checkpoints(specs, SIZES, 2)
    assert checkpoints.keys() == {f"{prefix}recurrent", f"{prefix}short_conv"}
    state = jnp.asarray(np.random.default_rng(1).random((2, 1, 2, 3, 4), "f"))
    kept = SavedState(one_row(slot=3), jnp.array([2]))
    checkpoints = export(specs, pools, checkpoints, kept, {f"{prefix}recurrent": state})
    slots = jnp.array([2, 0])  # the second one is padding
    after = restore(specs, pools, checkpoints, jnp.array([2, 0]), slots)
    one, other = pools[f"{prefix}recurrent"], after[f"{prefix}recurrent"]
    np.testing.assert_array_equal(other.states[:, 2, 0], state[:, 0])
    np.testing.assert_array_equal(other.conv[:, 2], one.conv[:, 3])
    short = f"{prefix}short_conv"
    np.testing.assert_array_equal(after[short][:, 2], pools[short][:, 3])
    for slot in (0, 1, 3):
        np.testing.assert_array_equal(other.states[:, slot], one.states[:, slot])
        np.testing.assert_array_equal(other.conv[:, slot], one.conv[:, slot])
        np.testing.assert_array_equal(after[short][:, slot], pools[short][:, slot])
    assert after[f"{prefix}kv"] is pools[f"{prefix}kv"]


def test_a_checkpoint_has_one_state_and_no_ring():
    specs = [recurrent(Replay(window=8))]
    (kept,) = allocate_checkpoints(specs, SIZES, 5).values()
    assert kept.states.shape == (2, 6, 2, 3, 4) and kept.conv.shape == (2, 6, 4 - 1 + 3, 5)


def test_without_checkpoints_nothing_is_restored():
    pools = allocate([recurrent()], SIZES)
    assert restore([recurrent()], pools, {}, jnp.array([1]), jnp.array([1])) is pools
