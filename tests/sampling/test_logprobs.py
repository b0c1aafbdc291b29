"""What is packed of a token, against NumPy in float64."""

import jax
import numpy as np
import pytest

from jaxspec.requests.logprobs import LAYOUT
from jaxspec.requests.sampling_params import MAX_LOGPROBS
from jaxspec.sampling.logprobs import pack_logprobs

PACK = jax.jit(pack_logprobs)


@pytest.mark.parametrize("vocab", [7, 264, 6000])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 300.0], ids=["flat", "as models have", "peaked"])
def test_it_is_the_log_softmax_of_the_logits(vocab, scale):
    random = np.random.default_rng(vocab)
    logits = (random.normal(size=(9, vocab)) * scale).astype(np.float32)
    logits[3] = np.round(logits[3] / scale) * scale  # many equals
    tokens = random.integers(0, vocab, 9).astype(np.int32)
    tokens[5] = -1  # nobody reads what comes of it, and it spoils nothing
    fields = LAYOUT.unpack(np.asarray(PACK(logits, tokens)))
    exact = logits.astype(np.float64)
    total = np.log(np.exp(exact - exact.max(1, keepdims=True)).sum(1))
    for row in {*range(9)} - {5}:
        own = logits[row, tokens[row]]
        assert fields["logit"][row] == own
        assert fields["rank"][row] == 1 + (logits[row] > own).sum()
        assert abs(fields["log_total"][row] - total[row]) < 1e-5
        order = np.argsort(-logits[row], kind="stable")[:MAX_LOGPROBS]
        np.testing.assert_array_equal(fields["top_ids"][row][: len(order)], order)
        np.testing.assert_array_equal(fields["top_logits"][row][: len(order)], logits[row][order])
        assert (fields["top_ids"][row][len(order) :] == -1).all()


def test_no_rows_have_no_fields():
    fields = PACK(np.zeros((0, 6000), np.float32), np.zeros(0, np.int32))
    assert fields.shape == (0, LAYOUT.size) and fields.dtype == np.int32
