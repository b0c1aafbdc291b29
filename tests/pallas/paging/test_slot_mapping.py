"""slot_mapping, and its kernel, against a walk through the page table."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.pallas.paging.slot_mapping import slot_mapping
from jaxspec.pallas.paging.slot_mapping_kernel import slot_mapping_kernel


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


def check(op, num_tokens):
    rng = np.random.default_rng(num_tokens)
    page_tables = rng.integers(-1, 9, size=(4, 5)).astype(np.int32)
    slots = rng.integers(-3, 7, size=num_tokens).astype(np.int32)
    positions = rng.integers(-20, 60, size=num_tokens).astype(np.int32)
    live = rng.random(num_tokens) < 0.8
    positions[:3], slots[:3] = [2**31 - 1, -(2**31), 0], [1, 1, -(2**31)]
    actual = op(*map(jnp.asarray, (page_tables, slots, positions, live)), page_size=8)
    expected = oracle(page_tables, slots, positions, live, 8)
    assert actual.dtype == jnp.int32
    np.testing.assert_array_equal(actual, expected)
    assert (expected >= 8).sum() > num_tokens / 25


def test_every_token_gets_its_page_and_offset_and_padding_none():
    check(slot_mapping, 400)


def test_a_position_maps_as_in_the_example():
    page_tables = jnp.zeros((2, 4), jnp.int32).at[1, 2].set(7)
    one = jnp.ones(1, jnp.int32)
    slots = slot_mapping(page_tables, one, one * 37, one == 1, page_size=16)
    assert slots.tolist() == [117]


@pytest.mark.mosaic
@pytest.mark.parametrize("num_tokens", [48, 77])  # full blocks, and a last one that is not
def test_the_kernel_maps_alike_without_races(num_tokens):
    from jax._src.pallas.mosaic_gpu.interpret.interpret_pallas_call import get_races
    from jax.experimental.pallas import mosaic_gpu as plgpu

    interpret = plgpu.InterpretGPUParams(detect_races=True)
    check(functools.partial(slot_mapping_kernel, interpret=interpret), num_tokens)
    assert not get_races().races_found


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [64, 2047])
def test_on_a_gpu_op_and_kernel_map_alike(num_tokens):
    for op in (slot_mapping, slot_mapping_kernel):
        check(op, num_tokens)
