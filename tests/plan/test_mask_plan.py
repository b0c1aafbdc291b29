"""Masks in a plan: those of each request's grammar, with its allowed ids."""

import numpy as np
from constrained import grammar_of, matchers

from jaxspec.grammar import fill_masks
from jaxspec.plan.mask_plan import mask_layout, pack_masks
from jaxspec.plan.step_shapes import StepShapes
from jaxspec.requests.request import Request
from jaxspec.requests.sampling_params import SamplingParams

VOCAB, WIDTH = 2080, 4
SHAPES = StepShapes(
    max_num_seqs=11,
    max_model_len=64,
    page_size=4,
    num_pages=17,
    num_drafts=WIDTH - 1,
    decode_rows=(11,),
    prefill_tokens=(16,),
    vocab_size=VOCAB,
)


def request_of(slot, drafts, **params):
    request = Request((1,), SamplingParams(**params), 0)
    request.slot, request.next_drafts = slot, drafts
    request.matcher = matchers().matcher(grammar_of({"regex": "(?:ab|cd)+"}))
    return request


def test_each_slot_gets_the_masks_after_its_drafts_within_its_allowed_ids():
    few = [token for token in range(VOCAB) if token % 3]
    requests = [
        request_of(2, (66, 67, -1)),  # "a" and "b": the third place is the last
        request_of(1, (), allowed_token_ids=few),
        *(request_of(slot, (66, 67)[: slot % 3]) for slot in range(3, 12)),
    ]
    plans = [mask_layout(SHAPES).unpack(packed) for packed in pack_masks(requests, SHAPES)]
    slots = np.concatenate([fields["slots"] for fields in plans]).tolist()
    assert slots == [2, 1, *range(3, 12)] + [0] * (2 * SHAPES.masks_per_write - 11)
    written = np.concatenate([fields["masks"] for fields in plans])
    for request, masks in zip(requests, written, strict=False):
        expected = np.full((1, WIDTH, -(-VOCAB // 32)), -1, np.int32)
        fill_masks([request.matcher], [request.next_drafts], expected)
        bits = np.unpackbits(expected[0].view(np.uint8), axis=1, bitorder="little")
        if request.params.allowed_token_ids:
            bits[:, [each for each in range(bits.shape[1]) if each % 3 == 0 or each >= VOCAB]] = 0
        got = np.unpackbits(masks.view(np.uint8), axis=1, bitorder="little")
        np.testing.assert_array_equal(got, bits)
        assert 0 < got[0].sum() < 100
