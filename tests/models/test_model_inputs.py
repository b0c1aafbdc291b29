"""Where a step's tokens are cut into decode rectangle and prefill region."""

import jax.numpy as jnp

from jaxspec.models.model_inputs import ModelInputs
from jaxspec.regions import DecodeRegion


def test_the_rectangle_comes_first_padding_included():
    rows, tokens = jnp.zeros(3, jnp.int32), jnp.zeros(20, jnp.int32)
    region = DecodeRegion(*[rows] * 5)
    inputs = ModelInputs(tokens, tokens, tokens, tokens > 0, rows[:, None], region, None, 4)
    assert inputs.num_decode_tokens == 12
