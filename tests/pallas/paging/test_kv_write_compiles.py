"""The write of keys and values compiles for an H200."""

import re

import jax.numpy as jnp
import pytest
from sm90 import array, compile_for

from jaxspec.pallas.paging.kv_write import kv_write

OPTIMIZED = True  # as for a user


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float8_e4m3fn])
def test_a_pool_is_neither_widened_nor_copied(h200, monkeypatch, dtype):
    """XLA could do either to scatter into 8 bits."""
    monkeypatch.setattr("jaxspec.device.default_device", lambda: h200)

    def step(kv, keys, slots):
        for layer in range(2):
            kv = kv_write(kv, layer, keys, keys, slots)
            keys = keys + kv[layer, 0, slots[:1], 0].astype(keys.dtype)
        return kv

    pool = array(2, 2, 32768, 16, 8, 128, dtype=dtype)
    operands = pool, array(256, 8, 128, dtype=jnp.bfloat16), array(256, dtype=jnp.int32)
    compiled = compile_for(h200, monkeypatch, step, operands, donated=0)
    assert not re.findall(r"copy(-start)?\(", compiled.as_text())
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes == pool.size * pool.dtype.itemsize
    assert memory.temp_size_in_bytes < 2**24
