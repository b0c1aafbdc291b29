"""Sampling tables of one state slot: allowed ids, biases, bad words, stop ids, newest tokens.

They are too large for a batch row or for the plan of every step. So a separate plan (`plan.TABLES`)
writes the tables of a slot before the step in which the request enters. Imports no JAX.
"""

import functools

import numpy as np

from jaxspec.layout import Field, PackedLayout
from jaxspec.requests.request import ROW_STOP_IDS, Request

MAX_STOP_IDS = 256
"""Most stop ids of a request, including the EOS ids of the model."""
MAX_BIASES = 1024
"""Most entries of `logit_bias`."""
MAX_BAD_WORDS = 256
"""Most token sequences of `bad_words`; each text becomes up to two."""
MAX_BAD_WORD_TOKENS = 32
"""Most tokens of such a sequence."""
MORE_STOP_IDS = MAX_STOP_IDS - ROW_STOP_IDS  # stored in the tables


@functools.cache
def table_layout(vocab_size: int, recent: int = MAX_BAD_WORD_TOKENS) -> PackedLayout:
    """Return the layout of a plan that writes the sampling tables of a slot.

    Args:
        vocab_size: Number of token ids.
        recent: Newest tokens stored for a slot.
    """
    words = MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS
    return PackedLayout(
        [
            Field("slot", "Slot of the tables; 0 writes none."),
            Field("allowed", "One bit per id, the lowest first.", shape=(-(-vocab_size // 32),)),
            Field("bias_ids", "Ids with a bias, then -1.", shape=(MAX_BIASES,)),
            Field("biases", "Biases of these ids.", shape=(MAX_BIASES,), dtype=np.float32),
            Field("bad_words", "Token sequences, each padded with -1 in front.", shape=words),
            Field("more_stop_ids", "Those beyond the row's, then -1.", shape=(MORE_STOP_IDS,)),
            Field("recent", "Newest tokens; token `i` is at `i % length`, or -1.", shape=(recent,)),
        ]
    )


def pack_tables(request: Request, vocab_size: int, recent: int = MAX_BAD_WORD_TOKENS) -> np.ndarray:
    """Return the packed plan (int32) that writes the sampling tables of a request that has a slot.

    Its ids are in the vocabulary and within the limits above: `inputs` validates them. Steps add
    only the tokens that they compute, so the newest ones of a cached prefix are written here.
    """
    params, layout = request.params, table_layout(vocab_size, recent)
    packed = np.zeros(layout.size, np.int32)
    fields = layout.unpack(packed)
    fields["slot"][...] = request.slot
    fields["allowed"][:] = bits_of(params.allowed_token_ids, len(fields["allowed"]))
    for name in ("bias_ids", "bad_words", "more_stop_ids", "recent"):
        fields[name][...] = -1
    biases = params.logit_bias or {}
    fields["bias_ids"][: len(biases)] = list(biases)
    fields["biases"][: len(biases)] = list(biases.values())
    for entry, word in zip(fields["bad_words"], request.bad_words, strict=False):
        entry[len(entry) - len(word) :] = word
    more = request.stop_ids[ROW_STOP_IDS:]
    fields["more_stop_ids"][: len(more)] = more
    end = request.num_computed
    index = np.arange(max(0, end - recent), end)
    fields["recent"][index % recent] = request.tokens[max(0, end - recent) : end]
    return packed


def bits_of(allowed: tuple[int, ...] | list[int] | None, num_words: int) -> np.ndarray:
    """Return one bit per id in 32-bit words; None allows all ids."""
    if allowed is None:
        return np.full(num_words, -1, np.int32)
    bits = np.zeros(num_words * 32, np.uint8)
    bits[list(allowed)] = 1
    return np.packbits(bits, bitorder="little").view("<i4")
