"""What a proposer drafts is made harmless: ids outside the vocabulary, and numbers of drafts."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.proposers import Drafts, Proposer
from jaxspec.requests.sampling_features import GREEDY
from jaxspec.runner.propose import DROPPED, propose

INPUTS = SimpleNamespace(slots=jnp.zeros(4, jnp.int32), num_drafts=2, features=GREEDY)
MODEL = SimpleNamespace(vocab_size=10)


class Given(Proposer):
    num_drafts = 2

    def __init__(self, tokens, counts):
        self.drafts = Drafts(jnp.array(tokens, jnp.int32), jnp.array(counts, jnp.int32), None)

    def propose(self, model, inputs, pools, tables):
        pools["mine"] = 3  # which nobody sees
        return self.drafts, {}


def test_an_id_is_in_the_vocabulary_or_a_placeholder_or_dropped():
    low, high = -(2**31), 2**31 - 1
    proposer = Given([[0, 9], [10, -1], [-2, 3], [low, high]], [2, 3, -1, 0])
    pools = {}
    drafts, after = jax.jit(lambda: propose(proposer, MODEL, INPUTS, pools, ()))()
    want = [[0, 9], [DROPPED, -1], [DROPPED, 3], [DROPPED, DROPPED]]
    np.testing.assert_array_equal(drafts.tokens, want)
    assert drafts.num_drafts.tolist() == [2, 2, 0, 0]
    assert DROPPED < -1 and pools == after == {}
