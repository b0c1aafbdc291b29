import jax.numpy as jnp
import numpy as np

from jaxspec.pallas.selection import LastKept

INF = np.inf


def test_the_mask_keeps_the_ids_up_to_the_last_kept_one():
    """In the order of the logits; of equal logits the lower id is first, and a NaN is kept."""
    logits = jnp.asarray([[1.0, 2.0, 1.0, 0.0, 1.0], [np.nan, 3.0, 3.0, -INF, 5.0]])
    kept = LastKept(jnp.asarray([1.0, 3.0]), jnp.asarray([2, 1])).mask(logits)
    want = [[1.0, 2.0, 1.0, -INF, -INF], [np.nan, 3.0, -INF, -INF, 5.0]]
    np.testing.assert_array_equal(kept, want)


def test_none_keeps_every_id_and_rows_are_chosen():
    logits = jnp.asarray([[1.0, -INF], [1.0, 2.0]])
    last = LastKept(jnp.full(2, 2.0), jnp.zeros(2, jnp.int32))
    mixed = last.where(jnp.asarray([False, True]), LastKept.none(2))
    np.testing.assert_array_equal(mixed.mask(logits), [[1.0, -INF], [-INF, -INF]])
