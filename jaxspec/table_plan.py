"""What a request forbids and favours, laid out for its slot: the plan that brings it to the device.

A row has no room for it, and plans of steps would grow. So a plan of its own (`plan.TABLES`) writes
the tables of one slot, before the step in which the request enters. No JAX here.
"""

import functools

import numpy as np

from jaxspec.layout import Field, PackedLayout
from jaxspec.request import ROW_STOP_IDS, Request

MAX_STOP_IDS = 256
"""Stop ids of a request, the model's own among them."""
MAX_BIASES = 1024
"""Entries of `logit_bias`."""
MAX_BAD_WORDS = 256
"""Sequences of token ids that `bad_words` may become: up to two for each text."""
MAX_BAD_WORD_TOKENS = 32
"""Tokens of such a sequence."""
MORE_STOP_IDS = MAX_STOP_IDS - ROW_STOP_IDS  # that are in the tables


@functools.cache
def table_layout(vocab_size: int) -> PackedLayout:
    """Where each field of a plan of tables lies in its packed array."""
    words = MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS
    return PackedLayout(
        [
            Field("slot", "The slot whose tables these are; 0: none is written."),
            Field("allowed", "A bit an id, the lowest first.", shape=(-(-vocab_size // 32),)),
            Field("bias_ids", "Ids with a bias; then -1.", shape=(MAX_BIASES,)),
            Field("biases", "What is added to theirs.", shape=(MAX_BIASES,), dtype=np.float32),
            Field("bad_words", "Sequences, each behind its padding of -1.", shape=words),
            Field("more_stop_ids", "Those that its row lacks; then -1.", shape=(MORE_STOP_IDS,)),
        ]
    )


def pack_tables(request: Request, vocab_size: int) -> np.ndarray:
    """The packed plan (int32) that writes the tables of a request, which has a slot.

    Its ids are checked: `inputs` refuses what the vocabulary lacks and what there is no room for.
    """
    params, layout = request.params, table_layout(vocab_size)
    packed = np.zeros(layout.size, np.int32)
    fields = layout.unpack(packed)
    fields["slot"][...] = request.slot
    fields["allowed"][:] = _bits(params.allowed_token_ids, len(fields["allowed"]))
    for name in ("bias_ids", "bad_words", "more_stop_ids"):
        fields[name][...] = -1
    biases = params.logit_bias or {}
    fields["bias_ids"][: len(biases)] = list(biases)
    fields["biases"][: len(biases)] = list(biases.values())
    for entry, word in zip(fields["bad_words"], request.bad_words, strict=False):
        entry[len(entry) - len(word) :] = word
    more = request.stop_ids[ROW_STOP_IDS:]
    fields["more_stop_ids"][: len(more)] = more
    return packed


def _bits(allowed: tuple[int, ...] | list[int] | None, num_words: int) -> np.ndarray:
    """A bit for each id, in words of 32; None allows all."""
    if allowed is None:
        return np.full(num_words, -1, np.int32)
    bits = np.zeros(num_words * 32, np.uint8)
    bits[list(allowed)] = 1
    return np.packbits(bits, bitorder="little").view("<i4")
