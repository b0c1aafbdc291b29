"""What a slot keeps for recurrent layers under each policy, whatever the family of the mixer."""

import jax.numpy as jnp
import pytest

from jaxspec.cache import Conv, PerSlot, PoolSizes, Recurrent, Replay, Ring, Snapshot
from jaxspec.pallas.gated_delta.heads import GdnRing

SIZES = PoolSizes(num_pages=6, page_size=2, num_slots=5, width=4)
BF16, F16, F32 = map(jnp.dtype, ("bfloat16", "float16", "float32"))
GDN = Ring(GdnRing, (PerSlot((1, 4), F16), PerSlot((2, 3), F16), PerSlot((2,), F32)))


def pool_of(policy):
    conv, state = Conv(taps=4, parts=(2, 3), dtype=BF16), PerSlot((2, 3, 4), F16)
    return Recurrent("recurrent", 3, conv, state, GDN, policy).allocate(SIZES)


def test_snapshots_are_a_state_for_each_token_of_a_row():
    pool = pool_of(Snapshot())
    assert pool.states.shape == (3, 5, 4, 2, 3, 4) and pool.states.dtype == F16
    assert pool.ring is None


def test_a_ring_takes_the_place_of_all_candidates_but_one():
    pool = pool_of(Replay(window=16))
    assert pool.states.shape == (3, 5, 1, 2, 3, 4)
    assert pool.ring.k.shape == (3, 5, 20, 1, 4) and pool.ring.u.shape == (3, 5, 20, 2, 3)
    assert pool.ring.g.shape == (3, 5, 20, 2) and pool.ring.g.dtype == F32
    assert pool.ring.k.dtype == pool.ring.u.dtype == F16
    assert pool.ring.window == 16


@pytest.mark.parametrize("policy", [Snapshot(), Replay(window=16)])
def test_convolution_inputs_have_room_for_the_taps_and_a_steps_tokens(policy):
    pool = pool_of(policy)
    assert pool.conv.shape == (3, 5, 3 + 4, 5) and pool.conv.dtype == BF16
