"""Linear layers that are parts of one: their outputs side by side, or their sum."""

import jax.numpy as jnp
import numpy as np

from jaxspec.models.layers.linear import Linear, side_by_side, summed

RANDOM = np.random.default_rng(0)
FLOAT32 = jnp.dtype(jnp.float32)


def normal(*dims):
    return jnp.asarray(RANDOM.normal(size=dims), jnp.float32)


def test_layers_side_by_side_read_their_columns_of_one_matrix():
    parts = Linear(8, {"a": 3, "b": 2}, FLOAT32, multiple=4), Linear(8, {"c": 7}, FLOAT32)
    whole = side_by_side(parts)
    whole.weight.array.set_value(normal(8, 256))
    assert parts[0].weight is parts[1].weight is whole.weight
    x = normal(2, 8)
    for part, output in zip(parts, whole.split(whole.joined(x)), strict=True):
        np.testing.assert_allclose(part.joined(x), output, rtol=1e-5, atol=1e-6)
    (placement,) = parts[1].checkpoint("m.")
    assert placement.index == (slice(0, 8), slice(128, 135)) and placement.param is whole.weight


def test_summed_layers_are_rows_of_one_matrix():
    parts = Linear(8, {"a": 5}, FLOAT32), Linear(4, {"b": 5}, FLOAT32)
    whole = summed(parts)
    whole.weight.array.set_value(normal(12, 5))
    x = normal(2, 8), normal(2, 4)
    both = sum(part.joined(y) for part, y in zip(parts, x, strict=True))
    together = whole.joined(jnp.concatenate(x, axis=1))
    np.testing.assert_allclose(together, both, rtol=1e-5, atol=1e-6)
    (placement,) = parts[1].checkpoint("m.")
    assert placement.index == (slice(8, 12), slice(0, 5)) and placement.param is whole.weight
