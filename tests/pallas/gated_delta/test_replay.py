"""The output norm of gdn_replay."""

import jax.numpy as jnp
import numpy as np
import pytest
from recurrences import GDN
from regions import decode_region
from replays import pools

from jaxspec.pallas.gated_delta.replay import gdn_replay
from jaxspec.pallas.norm.gated_norm import GatedNorm

WIDTH = 4


def test_a_norm_of_other_tokens_is_refused():
    """A kernel would read what lies behind its gates."""
    tokens = GDN.draw(np.random.default_rng(0), 1, WIDTH)
    features = GDN.small.value_heads * 5
    norm = GatedNorm(jnp.zeros((WIDTH - 1, features)), jnp.zeros(5), first=0, eps=1e-6)
    with pytest.raises(ValueError, match=f"gates of {WIDTH} tokens, but these are of {WIDTH - 1}"):
        gdn_replay(tokens, *pools(GDN, np.zeros, width=WIDTH), 0, decode_region([1], WIDTH), norm)
