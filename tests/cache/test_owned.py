import jax.numpy as jnp
import numpy as np

from jaxspec.cache import Moves, PagedKV, PoolSizes, owned, pools_of, with_pools_of

SPEC = PagedKV("kv", 2, heads=1, head_dim=4, dtype=jnp.dtype("float32"))
SIZES = PoolSizes(num_pages=3, page_size=2, num_slots=2, width=1)


def test_two_models_keep_pools_of_one_kind_apart():
    (theirs,) = owned("draft", [SPEC])
    assert (theirs.name, theirs.layers) == ("draft/kv", 2)
    pools = {"kv": 1, "draft/kv": 2}
    assert pools_of("draft", pools) == {"kv": 2}
    assert with_pools_of("draft", pools, {"kv": 3}) == {"kv": 1, "draft/kv": 3}


def test_an_owned_pool_is_its_specs_under_another_name():
    (theirs,) = owned("draft", [SPEC])
    pool = theirs.allocate(SIZES)
    assert pool.shape == SPEC.allocate(SIZES).shape
    assert list(theirs.holders(pool)) == list(theirs.partition()) == ["draft/kv"]
    none = jnp.zeros(1, jnp.int32)
    moves = Moves(none, none, jnp.array([1]), jnp.array([2]))
    pool = pool.at[:, :, 1].set(5.0)
    np.testing.assert_array_equal(theirs.copy(pool, moves), SPEC.copy(pool, moves))
