"""What users read of what a device reported."""

import numpy as np

from jaxspec.logprobs import LAYOUT, Logprob, readable
from jaxspec.sampling_params import MAX_LOGPROBS


def reported(logits, token):
    """The packed row of one token, from NumPy's own sort."""
    logits = np.asarray(logits, np.float32)
    order = np.argsort(-logits, kind="stable")[:MAX_LOGPROBS]
    row = np.zeros(LAYOUT.size, np.int32)
    fields = LAYOUT.unpack(row)
    fields["logit"][...] = logits[token]
    fields["rank"][...] = 1 + (logits > logits[token]).sum()
    fields["log_total"][...] = np.log(np.exp(logits - logits.max()).sum())
    fields["top_ids"][:] = -1
    fields["top_ids"][: len(order)] = order
    fields["top_logits"][:] = -np.inf
    fields["top_logits"][: len(order)] = logits[order]
    return row


LOGITS = [0.0, 3.0, 1.0, 3.0, -2.0]
EXACT = np.array(LOGITS) - np.log(np.exp(LOGITS).sum())


def ids_and_ranks(entry):
    return [(token, found.rank) for token, found in entry.items()]


def test_the_token_comes_first_and_then_the_likeliest():
    (entry,) = readable([reported(LOGITS, 0)], [0], 3, None)
    assert ids_and_ranks(entry) == [(0, 4), (1, 1), (3, 1), (2, 3)]
    for token, found in entry.items():
        assert abs(found.logprob - EXACT[token]) < 1e-6 and found.decoded_token is None


def test_a_token_among_the_likeliest_is_there_once():
    (entry,) = readable([reported(LOGITS, 3)], [3], 2, None)
    assert ids_and_ranks(entry) == [(3, 1), (1, 1)]


def test_none_of_the_likeliest_may_be_asked_for():
    (entry,) = readable([reported(LOGITS, 4)], [4], 0, None)
    assert ids_and_ranks(entry) == [(4, 5)]


def test_a_small_vocabulary_has_fewer():
    (entry,) = readable([reported(LOGITS, 1)], [1], MAX_LOGPROBS, None)
    assert ids_and_ranks(entry) == [(1, 1), (3, 1), (2, 3), (0, 4), (4, 5)]


def test_every_id_has_its_text():
    (entry,) = readable([reported(LOGITS, 2)], [2], 1, lambda token: f"<{token}>")
    assert [found.decoded_token for found in entry.values()] == ["<2>", "<1>"]


def test_logits_that_round_to_one_logprob_keep_their_ranks():
    """Logprobs of float32 would be equal here, and so would their ranks be."""
    logits = [0.1, np.nextafter(np.float32(0.1), np.float32(1)), 12.0]
    entries = readable([reported(logits, 0), reported(logits, 1)], [0, 1], 3, None)
    for entry in entries:
        assert {token: found.rank for token, found in entry.items()} == {0: 3, 1: 2, 2: 1}


def test_no_tokens_have_no_logprobs():
    assert readable([], [], 3, None) == []
    assert Logprob(-1.0) == (-1.0, None, None)
