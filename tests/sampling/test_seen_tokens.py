"""Counts of tokens by slot, against dicts in Python."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.sampling.seen_tokens import SeenTokens

SLOTS, VOCAB = 5, 12


@pytest.mark.parametrize(("longest", "dtype"), [(32_767, jnp.int16), (32_768, jnp.int32)])
def test_counts_have_room_for_the_longest_request(longest, dtype):
    empty = SeenTokens.empty(SLOTS, VOCAB, longest)
    assert empty.counts.dtype == dtype and empty.in_prompt.dtype == bool
    assert not empty.counts.any() and not empty.in_prompt.any()


def test_true_tokens_are_counted_and_no_others():
    random = np.random.default_rng(0)
    seen = SeenTokens.empty(SLOTS, VOCAB, 99)
    counts, in_prompt = np.zeros((SLOTS, VOCAB), int), np.zeros((SLOTS, VOCAB), bool)
    for _ in range(5):
        slots, tokens = random.integers(1, SLOTS, 20), random.integers(0, VOCAB, 20)
        is_prompt, is_true = random.random((2, 20)) < 0.5
        tokens = np.where(is_true, tokens, -1)  # as a placeholder
        seen = seen.with_tokens(slots.astype(np.int32), tokens.astype(np.int32), is_prompt, is_true)
        for slot, token, prompt in zip(
            slots[is_true], tokens[is_true], is_prompt[is_true], strict=True
        ):
            counts[slot, token] += not prompt
            in_prompt[slot, token] |= prompt
    np.testing.assert_array_equal(seen.counts, counts)
    np.testing.assert_array_equal(seen.in_prompt, in_prompt)


def test_slots_are_copied_and_cleared_and_padding_does_neither():
    seen = SeenTokens.empty(SLOTS, VOCAB, 99)
    rows = jnp.arange(SLOTS, dtype=jnp.int32)
    both = jnp.array([False] * SLOTS)
    seen = seen.with_tokens(rows, rows, both, ~both).with_tokens(rows, rows + 1, ~both, ~both)
    moved = seen.copied(jnp.array([1, 1, 0]), jnp.array([3, 2, 0]))
    for part, before in ((moved.counts, seen.counts), (moved.in_prompt, seen.in_prompt)):
        np.testing.assert_array_equal(part, before[jnp.array([0, 1, 1, 1, 4])])
    cleared = moved.cleared(jnp.array([2, SLOTS]))
    assert not cleared.counts[2].any() and not cleared.in_prompt[2].any()
    np.testing.assert_array_equal(cleared.counts[3], moved.counts[3])
