"""The kernel of slot_mapping compiles for an H200 without spills."""

import jax.numpy as jnp
import pytest
from sm90 import array, assert_lean, compile_for

from jaxspec.pallas.paging.slot_mapping_kernel import slot_mapping_kernel

OPTIMIZED = True  # as for a user


@pytest.mark.parametrize("tokens", [64, 2047])
def test_slot_mapping(h200, monkeypatch, capfd, tokens):
    def step(page_tables, slots, positions, live):
        return slot_mapping_kernel(page_tables, slots, positions, live, page_size=16)

    index = array(tokens, dtype=jnp.int32)
    operands = array(257, 2048, dtype=jnp.int32), index, index, array(tokens, dtype=jnp.bool_)
    compiled = compile_for(h200, monkeypatch, step, operands)
    assert_lean(compiled, capfd.readouterr().out)
