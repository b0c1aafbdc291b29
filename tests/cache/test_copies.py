"""What of pools is copied out and back: any pages of any kind, and checkpoints."""

import jax
import jax.numpy as jnp
import numpy as np
from pools import CONVS, HIDDEN, HISTORY, KV, SIZES, StrangePages, random_like, recurrent

from jaxspec.cache import allocate, allocate_checkpoints, namespaced
from jaxspec.cache.copies import (
    paged,
    read_checkpoint,
    read_pages,
    uncopied,
    write_checkpoint,
    write_pages,
)

SPECS = (KV, HISTORY, HIDDEN, recurrent(), CONVS, *namespaced("draft", [KV, recurrent()]))


def ints(*values):
    return jnp.array(values, jnp.int32)


def test_every_kind_of_pool_can_be_copied_out():
    strange = StrangePages("strange", 1)
    assert uncopied(SPECS) == []
    assert uncopied([*SPECS, strange, *namespaced("draft", [strange])]) == [
        "strange",
        "draft/strange",
    ]
    assert [spec.name for spec in paged(SPECS)] == ["kv", "tokens", "hidden_states", "draft/kv"]


def test_pages_come_in_the_order_asked_for_and_go_where_they_are_told():
    pools = random_like(allocate(SPECS, SIZES), 0)
    copies = read_pages(SPECS, pools, ints(2, 0, 1))
    assert copies.keys() == {"kv", "tokens", "hidden_states", "draft/kv"}
    np.testing.assert_array_equal(copies["kv"][0], pools["kv"][:, :, 2])
    np.testing.assert_array_equal(copies["tokens"][2], pools["tokens"][1])
    other = random_like(allocate(SPECS, SIZES), 1)
    after = write_pages(SPECS, other, copies, ints(2, 0), ints(1, 0))  # the second goes nowhere
    for name, axis in {"kv": 2, "tokens": 0, "hidden_states": 0, "draft/kv": 2}.items():
        now, before, source = (
            np.moveaxis(np.asarray(x[name]), axis, 0) for x in (after, other, pools)
        )
        np.testing.assert_array_equal(now[1], source[1])
        np.testing.assert_array_equal(now[[0, 2]], before[[0, 2]])
    assert after["recurrent"] is other["recurrent"]


def test_a_checkpoint_goes_to_any_slot_and_no_other_one_changes():
    kept, other = (random_like(allocate_checkpoints(SPECS, SIZES, 3), seed) for seed in (0, 1))
    copy = read_checkpoint(SPECS, kept, jnp.int32(2))
    assert copy.keys() == {"recurrent", "short_conv", "draft/recurrent"}
    after = write_checkpoint(SPECS, other, copy, jnp.int32(3))
    for now, before, source in zip(*map(jax.tree.leaves, (after, other, kept)), strict=True):
        np.testing.assert_array_equal(now[:, 3], source[:, 2])
        np.testing.assert_array_equal(now[:, :3], before[:, :3])
    nowhere = write_checkpoint(SPECS, other, copy, jnp.int32(0))
    for now, before in zip(jax.tree.leaves(nowhere), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(now, before)
