"""slot_mapping against a walk through the page table."""

import jax.numpy as jnp
import numpy as np

from jaxspec.pallas.slot_mapping import slot_mapping


def oracle(page_tables, slots, positions, live, page_size):
    out = []
    for slot, position, is_live in zip(slots, positions, live, strict=True):
        known = is_live and 0 < slot < len(page_tables) and position >= 0
        if not known or position // page_size >= page_tables.shape[1]:
            out.append(-1)
            continue
        page = page_tables[slot, position // page_size]
        out.append(page * page_size + position % page_size if page > 0 else -1)
    return np.array(out)


def test_every_token_gets_its_page_and_offset_and_padding_none():
    rng = np.random.default_rng(0)
    page_tables = rng.integers(0, 9, size=(4, 5)).astype(np.int32)
    slots = rng.integers(-3, 7, size=400).astype(np.int32)
    positions = rng.integers(-20, 60, size=400).astype(np.int32)
    live = rng.random(400) < 0.8
    positions[:3], slots[:3] = [2**31 - 1, -(2**31), 0], [1, 1, -(2**31)]
    actual = slot_mapping(*map(jnp.asarray, (page_tables, slots, positions, live)), page_size=8)
    expected = oracle(page_tables, slots, positions, live, 8)
    assert actual.dtype == jnp.int32
    np.testing.assert_array_equal(actual, expected)
    assert (expected >= 8).sum() > 20


def test_a_position_maps_as_in_the_example():
    page_tables = jnp.zeros((2, 4), jnp.int32).at[1, 2].set(7)
    one = jnp.ones(1, jnp.int32)
    slots = slot_mapping(page_tables, one, one * 37, one == 1, page_size=16)
    assert slots.tolist() == [117]
