"""Queries, keys and values of Gated DeltaNet from the convolution's channels."""

import jax.numpy as jnp
import numpy as np

from jaxspec.pallas.gated_delta.heads import GdnHeads
from jaxspec.pallas.gated_delta.inputs import split_qkv


def test_queries_and_keys_have_length_one_and_values_pass():
    rng = np.random.default_rng(0)
    y = rng.normal(size=(5, 2 * 2 * 8 + 4 * 6)).astype(np.float32)
    q, k, v = split_qkv(jnp.asarray(y), GdnHeads(2, 8, 4))
    queries, keys, values = np.split(y.astype(np.float64), [16, 32], axis=1)
    for got, raw, length in ((q, queries, 8**-0.5), (k, keys, 1.0)):
        raw = raw.reshape(5, 2, 8)
        wanted = raw / np.sqrt((raw**2).sum(axis=2, keepdims=True) + 1e-6) * length
        np.testing.assert_allclose(got, wanted, rtol=1e-6)
    np.testing.assert_array_equal(v, values.reshape(5, 4, 6).astype(np.float32))


def test_a_head_of_zeros_stays_zero():
    q, k, _ = split_qkv(jnp.zeros((1, 24)), GdnHeads(1, 8, 1))
    assert not q.any() and not k.any()
