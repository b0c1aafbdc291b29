"""Filters of processors on the host: a mask per place, up to the first draft that is refused."""

import numpy as np
import pytest

from jaxspec import HostLogitsProcessor
from jaxspec.grammar import TokenFilter

VOCAB, WORDS = 70, 3


class Given(HostLogitsProcessor):
    """Returns results by the tokens before a place, and keeps what it was called with."""

    params = ("a",)

    def __init__(self, result):
        self.result, self.calls = result, []

    def __call__(self, prompt_ids, output_ids, args):
        self.calls.append((prompt_ids, output_ids, args))
        found = self.result(output_ids)
        if isinstance(found, Exception):
            raise found
        return found


def limited(*results, output=(5,), drafts=(), places=4):
    """The ids that are allowed at each place, and the processors."""
    processors = [Given(result) for result in results]
    masks = np.full((places, WORDS), -1, np.int32)
    own = TokenFilter([(each, {"a": 3}) for each in processors], VOCAB)
    own.limit(masks, (1, 2), output, drafts)
    bits = np.unpackbits(masks.view(np.uint8), axis=1, bitorder="little")
    return [np.flatnonzero(row).tolist() for row in bits], processors


def test_each_place_follows_the_output_and_its_drafts():
    masks, (one,) = limited(lambda output: [output[-1] + 1, 69], drafts=(6, 7, -1))
    assert masks[:3] == [[6, 69], [7, 69], [8, 69]] and len(masks[3]) == 32 * WORDS
    assert one.calls == [((1, 2), output, {"a": 3}) for output in ((5,), (5, 6), (5, 6, 7))]


def test_nothing_follows_a_draft_that_is_refused():
    masks, (one,) = limited(lambda output: {6}, drafts=(9, 6, 6))
    assert masks[0] == [6] and len(one.calls) == 1
    masks, _ = limited(lambda output: {6}, drafts=(6, 6, 6, 6), places=2)
    assert masks == [[6], [6]]


def test_processors_narrow_each_other():
    even = np.arange(VOCAB) % 2 == 0
    (first, *_), _ = limited(lambda output: even, lambda output: range(10), lambda output: None)
    assert first == [0, 2, 4, 6, 8]


@pytest.mark.parametrize(
    "result",
    [
        *(ValueError("x"), "text", 3, {"a": 1}, [1.5], ["a"], [VOCAB], [-1], [None]),
        *(np.ones(VOCAB + 1, bool), np.ones((1, VOCAB), bool), np.ones(VOCAB, np.float32)),
    ],
    ids=str,
)
def test_what_is_no_mask_allows_nothing(result, caplog):
    (first, *_), _ = limited(lambda output: result)
    assert first == [] and "Given failed" in caplog.text
