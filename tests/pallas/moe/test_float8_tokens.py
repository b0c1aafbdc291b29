"""Tiles of activations in FP8 have the numbers of their tokens."""

import jax.numpy as jnp
import numpy as np

from jaxspec.pallas.moe.float8_tokens import Float8Tokens

ROWS = 5


def test_tiles_have_the_numbers_and_factors_of_their_tokens():
    rng = np.random.default_rng(0)
    numbers = [jnp.asarray(rng.normal(size=(ROWS, 256)), jnp.float8_e4m3fn) for _ in range(2)]
    factors = jnp.asarray(rng.random((2, 8)), jnp.float32)
    tokens = Float8Tokens(tuple(numbers), factors, (0, 0))
    at = jnp.asarray([[0, 4], [4, 1], [1, 99]])  # no token has the last place
    tiled = tokens.in_tiles(tokens.joined[jnp.minimum(at, ROWS - 1)], at)
    assert tiled.factors.shape == (2, 6) and tiled.starts == (0, 256)
    for row, token in enumerate(at.reshape(6)[:5]):
        np.testing.assert_array_equal(tiled.factors[:, row], factors[:, token])
        for found, start, expected in zip(tiled.numbers, tiled.starts, numbers, strict=True):
            np.testing.assert_array_equal(
                *(
                    np.asarray(a, np.float32)
                    for a in (found[row, start : start + 256], expected[token])
                )
            )
