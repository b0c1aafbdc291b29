import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pools import CONVS, HIDDEN, HISTORY, KV, SIZES, random_like, recurrent

from jaxspec.cache import Moves, Replay, namespaced, pools_of, with_pools_of

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
    pool = random_like(spec.allocate(SIZES), 0)
    assert jax.tree.structure(theirs.allocate(SIZES)) == jax.tree.structure(pool)
    parts = jax.tree.map(id, spec.holders(pool))
    renamed = {f"draft/{name}": part for name, part in parts.items()}
    assert jax.tree.map(id, theirs.holders(pool)) == renamed
    moves = Moves(*(jnp.array([i], jnp.int32) for i in (1, 3, 1, 2)))
    copied = jax.tree.leaves(spec.copy(pool, moves))
    for ours, other in zip(copied, jax.tree.leaves(theirs.copy(pool, moves)), strict=True):
        np.testing.assert_array_equal(ours, other)
