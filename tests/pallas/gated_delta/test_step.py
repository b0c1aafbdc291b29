"""gdn_step in XLA, which solves for all tokens of a row, against the token-by-token reference."""

import jax.numpy as jnp
import numpy as np
import pytest
from recurrences import GDN
from regions import decode_region


@pytest.mark.few(3)
@pytest.mark.parametrize("width", range(1, 10))
def test_all_tokens_at_once_equal_one_after_the_other(width):
    rng = np.random.default_rng(width)
    states = jnp.asarray(rng.normal(size=(1, 4, width, *GDN.state(GDN.small))), jnp.float32)
    tokens = GDN.draw(rng, 3, width)
    query_len = [width, 1, width // 2]
    rows = decode_region([3, 1, 2], query_len, state_offset=[width - 1, 0, width // 2])
    out, after = GDN.step.run(tokens, states, 0, rows)
    want, expected = GDN.step.reference(tokens, states, 0, rows)
    for row, count in enumerate(query_len):
        np.testing.assert_allclose(out[row, :count], want[row, :count], atol=2e-6)
    np.testing.assert_allclose(after, expected, atol=2e-6)
