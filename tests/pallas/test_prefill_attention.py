"""prefill_attention against float64 attention, sequence by sequence."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.pallas.paged_attention import kv_write
from jaxspec.pallas.prefill_attention import prefill_attention

KV_HEADS, HEADS, DIM, PAGE_SIZE = 2, 4, 8, 16


def attention_oracle(queries, keys, values, first_position):
    out = np.zeros(queries.shape)
    group = queries.shape[1] // keys.shape[1]
    for token, head in np.ndindex(queries.shape[:2]):
        seen = first_position + token + 1
        scores = keys[:seen, head // group].astype(np.float64) @ queries[token, head]
        weights = np.exp((scores - scores.max()) / np.sqrt(queries.shape[2]))
        out[token, head] = weights / weights.sum() @ values[:seen, head // group]
    return out


@pytest.mark.parametrize(
    ("slots", "lengths", "computed"),
    [
        ([1, 2, 3], [65, 1, 64], [0, 100, 7]),
        ([2, 1, 3], [0, 130, 3], [5, 0, 0]),
        ([3, 0, 10**6], [3, 40, 40], [0, 0, 0]),  # null and unknown slots: padding
        ([-1, 0, 0], [0, 0, 0], [9, 9, 9]),
    ],
)
def test_prefill_attention_equals_attention_over_the_history(slots, lengths, computed):
    rng = np.random.default_rng(sum(lengths))
    normal = lambda *shape: rng.normal(size=shape).astype(np.float32)  # noqa: E731
    num_tokens, pages = 140, 10
    kv = jnp.full((2, 2, 1 + 3 * pages, PAGE_SIZE, KV_HEADS, DIM), jnp.nan)
    tables = np.zeros((4, pages), np.int32)
    tables[1:] = 1 + rng.permutation(3 * pages).reshape(3, pages)
    start = np.concatenate([[0], np.cumsum(lengths)])
    queries, expected = normal(num_tokens, HEADS, DIM), np.zeros((num_tokens, HEADS, DIM))
    queries[start[-1] :] = np.nan
    for seq, slot in enumerate(slots):
        total = computed[seq] + lengths[seq]
        if not 0 < slot < 4 or not lengths[seq]:
            continue
        keys, values = normal(total, KV_HEADS, DIM), normal(total, KV_HEADS, DIM)
        place = np.arange(total)
        where = tables[slot, place // PAGE_SIZE] * PAGE_SIZE + place % PAGE_SIZE
        kv = kv_write(kv, 1, *map(jnp.asarray, (keys, values, where.astype(np.int32))))
        mine = slice(start[seq], start[seq + 1])
        expected[mine] = attention_oracle(queries[mine], keys, values, computed[seq])
    indices = (jnp.asarray(x, jnp.int32) for x in (tables, slots, computed, start))
    out = jax.jit(prefill_attention, static_argnums=2)(jnp.asarray(queries), kv, 1, *indices)
    np.testing.assert_allclose(out, expected, atol=2e-6)
