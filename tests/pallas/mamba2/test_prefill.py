"""The tiles that mamba2_prefill's kernels cut prompts into."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from regions import prefill_region

from jaxspec.pallas.mamba2.prefill_kernel import _schedule
from jaxspec.pallas.mamba2.prefill_tiles import Sizes, Tile
from jaxspec.pallas.recurrent.chunk_blocks import ALIGN, sequences


@pytest.mark.mosaic
def test_tiles_hold_every_token_once_and_begin_where_copies_may():
    rng, tokens = np.random.default_rng(4), 1000
    schedule = jax.jit(_schedule, static_argnums=0)
    for tile in (64, 192, 1024):
        sizes = Sizes(1, 9, 2, 1, 64, 64, groups=1, tokens=tokens, tile=tile, dtype=jnp.bfloat16)
        for _ in range(10):
            edges = np.sort(rng.integers(0, tokens + 1, size=9))
            slots, computed = rng.integers(-1, 11, size=8), rng.integers(0, 2, size=8)
            chunks = prefill_region(slots, edges, num_computed=computed, state_offset=computed)
            seqs = sequences(chunks, tokens, sizes.num_slots)
            held, before = np.zeros(tokens, int), None
            for row in map(Tile._make, np.asarray(schedule(sizes, seqs))):
                if row.begin >= row.end:
                    continue
                held[row.begin : row.end] += 1
                owner = np.searchsorted(edges, row.begin, side="right") - 1
                real = 0 <= owner < 8 and 0 < slots[owner] < 9
                assert row.slot == (slots[owner] if real else 0)
                assert not real or row.source == (1 if computed[owner] else -1)
                assert row.end - row.begin // ALIGN * ALIGN <= tile
                assert 0 <= row.position < row.tiles
                assert row.position == 0 or row.begin % ALIGN == 0
                assert row.position == 0 or before == row.position - 1
                before = row.position
            assert (held == 1).all()
