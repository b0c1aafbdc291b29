"""Matcher: the position of a request in its grammar, and the masks of the tokens that may follow.

A mask is a row of int32 words with a bit per token id, lowest bit first.
"""

import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxspec.grammar.free_text import BITS, FreeText, bit_of, is_allowed
from jaxspec.grammar.library import library
from jaxspec.grammar.thinking import Reasoning, Thinking


class Vocabulary(NamedTuple):
    """Token ids of a model."""

    size: int
    bytes_of: Callable[[int], bytes]
    end: int | None = None  # the EOS token in llguidance's tokenizer
    other_ends: tuple[int, ...] = ()  # EOS ids that are text otherwise, or no token


class Matcher:
    """Position of one request in its grammar. Not thread-safe."""

    def __init__(
        self,
        matcher: Any,
        vocabulary: Vocabulary,
        thinking: Thinking | None = None,
        free_text: FreeText | None = None,
    ):
        """Begin at the start of an output.

        Args:
            matcher: An `llguidance.LLMatcher` of this request alone; None without a grammar.
            vocabulary: Token ids of the model.
            thinking: The reasoning that is limited, or precedes the grammar; None if there is none.
            free_text: Text before the grammar, or all text without one; None if the grammar has
                all of it.
        """
        self._matcher, self._vocabulary = matcher, vocabulary
        self._thinking, self._free_text = thinking, free_text
        self._reasoning = Reasoning("after") if thinking is None else Reasoning.start(thinking)
        self._is_refused = False

    def advance(self, tokens: Sequence[int]) -> None:
        """Continue after output tokens. A token that the grammar refuses is an error for good."""
        ids = self._with_one_end(tokens)
        rest = ids[self._advance_free(ids) :]
        if self._matcher is not None and rest:
            self._matcher.consume_tokens(rest)
        for token in rest:
            self._reasoning = self._after(self._reasoning, token)

    def _advance_free(self, ids: Sequence[int]) -> int:
        """Continue after the tokens of free text at the beginning; return their number."""
        for number, token in enumerate(ids):
            if self._free_text is None or not self._is_free(self._reasoning):
                return number
            self._is_refused |= not is_allowed(token, self._free_text.mask(self._reasoning))
            self._reasoning = self._after(self._reasoning, token)
        return len(ids)

    @property
    def is_error(self) -> bool:
        """True if a token was refused, or a limit of the grammar's time or memory exceeded."""
        return self._is_refused or (self._matcher is not None and self._matcher.is_error())

    @property
    def is_accepting(self) -> bool:
        """True if the output may end here."""
        if self._matcher is None:
            return True
        return not self._is_free(self._reasoning) and self._matcher.is_accepting()

    def _is_free(self, reasoning: Reasoning) -> bool:
        """Return whether the next token is of free text, which the grammar does not follow."""
        return self._free_text is not None and (
            self._matcher is None or reasoning.phase == "inside"
        )

    def _after(self, reasoning: Reasoning, token: int) -> Reasoning:
        if self._thinking is None:
            return reasoning
        return reasoning.after(token, self._thinking, self._vocabulary.bytes_of)

    def _with_one_end(self, tokens: Iterable[int]) -> list[int]:
        """Return tokens with llguidance's EOS token in place of the other ones."""
        end, others = self._vocabulary.end, self._vocabulary.other_ends
        if end is None or not others or self._matcher is None:
            return list(map(int, tokens))
        return [end if token in others else int(token) for token in tokens]

    def _valid(self, drafts: Sequence[int], most: int) -> list[int]:
        """Return the drafts before the first that is no token id, at most `most` of them."""
        size, ids = self._vocabulary.size, self._with_one_end(drafts[:most])
        return list(itertools.takewhile(lambda token: 0 <= token < size, ids))

    def _write_free(self, masks: np.ndarray, drafts: Sequence[int]) -> int | None:
        """Write the masks of places in free text.

        Returns:
            The first place in the grammar, or None if no draft leads there.
        """
        reasoning = self._reasoning
        for place in range(1 + len(drafts)):
            if self._free_text is None or not self._is_free(reasoning):
                return place
            masks[place] = self._free_text.mask(reasoning)
            if place < len(drafts):
                if not is_allowed(drafts[place], masks[place]):
                    return None
                reasoning = self._after(reasoning, drafts[place])
        return None

    def _add_ends(self, masks: np.ndarray) -> None:
        """Allow all EOS ids where one is allowed, and only there."""
        end, others = self._vocabulary.end, self._vocabulary.other_ends
        if self._matcher is None or end is None:
            return
        for other in others:
            word, bit = other // BITS, bit_of(other)
            is_end = (masks[:, end // BITS] & bit_of(end)) != 0
            masks[:, word] = np.where(is_end, masks[:, word] | bit, masks[:, word] & ~bit)

    def _limit(self, masks: np.ndarray, drafts: Sequence[int]) -> None:
        """Apply the limit of the reasoning to the masks after each number of drafts."""
        thinking, reasoning = self._thinking, self._reasoning
        if thinking is None or thinking.budget is None:
            return
        for place, token in enumerate([*drafts, None]):
            forced = reasoning.forced(thinking)
            if forced is not None:
                _keep_only(forced, masks[place])
            if token is not None:
                reasoning = self._after(reasoning, token)


def fill_masks(
    matchers: Sequence[Matcher], drafts: Sequence[Sequence[int]], masks: np.ndarray
) -> None:
    """Write the masks of the tokens that may follow, at each place of each matcher.

    Place j of a matcher is the state after its accepted tokens and the first j of its drafts.
    Places after a draft that the grammar refuses, or that is no token id, stay as they are. The
    masks of a matcher in error are zero.

    Args:
        matchers: The matchers, which do not move.
        drafts: The drafts of each.
        masks: int32 [at least len(matchers), places, ceil(vocab_size / 32)], contiguous.
    """
    places = masks.shape[1]
    valid = [m._valid(each, places - 1) for m, each in zip(matchers, drafts, strict=True)]
    starts = [m._write_free(masks[i], valid[i]) for i, m in enumerate(matchers)]
    _fill(matchers, valid, starts, masks)
    for number, matcher in enumerate(matchers):
        if matcher.is_error:
            masks[number] = 0
        else:
            matcher._add_ends(masks[number, : 1 + len(valid[number])])
            matcher._limit(masks[number], valid[number])


def _fill(
    matchers: Sequence[Matcher],
    drafts: Sequence[list[int]],
    starts: Sequence[int | None],
    masks: np.ndarray,
) -> None:
    """Write the masks of all matchers from their first place in the grammar, in several threads."""
    assert masks.dtype == np.int32 and masks.flags.c_contiguous  # it is written by its address
    count, places, words = masks.shape
    alone, ahead = list[tuple[Any, int]](), list[tuple[Any, int, list[int]]]()
    for number, (matcher, start) in enumerate(zip(matchers, starts, strict=True)):
        if start is None or matcher.is_error:
            continue
        index = number * places + start
        if tokens := drafts[number][start:]:
            ahead.append((matcher._matcher, index, tokens))
        else:
            alone.append((matcher._matcher, index))
    sizes = masks.ctypes.data, 4 * words, count * places
    if alone:
        _executor().unsafe_compute_mask_ptr(alone, *sizes)
    if ahead:
        _executor().unsafe_compute_mask_ptr_with_draft_token(ahead, *sizes)


@functools.cache
def _executor() -> Any:
    return library().LLExecutor()


def _keep_only(token: int, mask: np.ndarray) -> None:
    """Clear all bits but a token's, unless its own is clear.

    That is so in the middle of a character, whose bytes a grammar of text completes first.
    """
    word = token // BITS
    kept = mask[word] & bit_of(token)
    if kept:
        mask[:] = 0
        mask[word] = kept
