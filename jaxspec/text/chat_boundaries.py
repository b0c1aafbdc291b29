"""Chat boundaries: lengths of the prefixes that a chat prompt shares with those of later turns.

Most templates render a message differently once others follow it: they drop its reasoning, and a
generation prompt differs from the beginning of a rendered answer. So a prompt with its output is
often not a prefix of the next prompt. The boundary is measured with the template itself: the
conversation is rendered again with a further turn, and the common prefix of both texts is stable.

    <user>Hi</user><assistant><think>          prompt of this turn
    <user>Hi</user><assistant>x<user>x</user>  conversation with a further turn
    <user>Hi</user><assistant>                 common prefix: all tokens up to the last certain one
"""

import bisect
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import itemgetter
from typing import Any

from tokenizers import Encoding

MAX_PART = 2**16
"""Longest part of a text, in characters, that is tokenized again."""
_ID = "call00000"  # some templates require nine letters or digits
_USER = {"role": "user", "content": "x"}
_ANSWER = {"role": "assistant", "content": "x", "reasoning_content": "x", "thinking": "x"}
_CALL = {"id": _ID, "type": "function", "function": {"name": "x", "arguments": {}}}
_RESULT = {"role": "tool", "content": "x", "tool_call_id": _ID, "name": "x"}


def follow_ups(
    messages: Sequence[Mapping[str, Any]], *, has_tools: bool
) -> list[list[dict[str, Any]]]:
    """Return possible next turns of a conversation, each as a list of added messages.

    They are an answer with the next user message and, with tools, a tool call with its result.
    """
    if not messages:
        return []
    last = messages[-1]
    is_answered = last.get("role") == "assistant"
    turns = [[_USER] if is_answered else [_ANSWER, _USER]]
    if is_answered:
        return [*turns, [_RESULT]] if last.get("tool_calls") else turns
    calls = any(m.get("role") == "tool" or m.get("tool_calls") for m in messages)
    call = _ANSWER | {"tool_calls": [_CALL]}
    return [*turns, [call, _RESULT]] if has_tools or calls else turns


class AddedTokens:
    """Tokens that a tokenizer matches first, such as those that begin a message.

    They split a text into parts that are tokenized independently. Parts are split into words by
    rules that look one character ahead: the tokens before a word are stable if the text continues
    after that word.
    """

    def __init__(self, ids: Mapping[str, int]):
        self._ids = dict(ids)
        self._begun = {content[:n] for content in ids for n in range(1, len(content))}
        self._longest = max(map(len, ids), default=0)

    def stable_counts(
        self,
        text: str,
        lengths: Iterable[int],
        ids: Sequence[int],
        encode: Callable[[str], Encoding],
    ) -> tuple[int, ...]:
        """Return how many leading tokens stay the same whatever follows each prefix of a text.

        Args:
            text: The text.
            lengths: Prefix lengths of `text`, in characters.
            ids: Token ids of `text`.
            encode: Tokenizes a part of `text`, from an added token on. Parts longer than `MAX_PART`
                characters are not tokenized: the count then ends after the added token.

        Returns:
            The counts, ascending, unique and without 0.
        """
        lengths = {*lengths} - {0}
        if not lengths:
            return ()
        present = {*ids}
        there = {
            content: token_id
            for content, token_id in self._ids.items()
            if token_id in present and not self._is_part_of_another(content)
        }
        closed = [length - self._num_open(text, length) for length in lengths]
        counts = {_num_stable(text, length, ids, there, encode) for length in closed}
        return tuple(sorted(counts - {0}))

    def _is_part_of_another(self, content: str) -> bool:
        """Return whether a longer added token contains it, as a run of newlines contains one."""
        return any(content in other for other in self._ids if len(other) > len(content))

    def _num_open(self, text: str, length: int) -> int:
        """Return how many of the characters before `length` may begin an added token."""
        longest = min(self._longest, length)
        return next(
            (n for n in range(longest, 0, -1) if text[length - n : length] in self._begun), 0
        )


def _num_stable(
    text: str,
    length: int,
    ids: Sequence[int],
    added: Mapping[str, int],
    encode: Callable[[str], Encoding],
) -> int:
    places = ((text.rfind(content, 0, length), content) for content in added)
    start, content = max(places, key=lambda place: place[0] + len(place[1]), default=(-1, ""))
    first, stable = 0, 0
    if start >= 0:
        first, stable = _index_from_end(ids, added[content], text.count(content, start) - 1), 1
    start = max(start, 0)
    if length - start > MAX_PART:
        return first + stable
    part = encode(text[start:length])
    stable = max(stable, _last_word(part, length - start))
    return first + stable if list(ids[first : first + stable]) == part.ids[:stable] else 0


def _index_from_end(ids: Sequence[int], wanted: int, skipped: int) -> int:
    """Return the index of the id `wanted` that `skipped` equal ids follow; 0 if there is none."""
    backwards = (n for n in range(len(ids) - 1, -1, -1) if ids[n] == wanted)
    return next(itertools.islice(backwards, skipped, None), 0)


def _last_word(encoding: Encoding, length: int) -> int:
    """Return the number of tokens in words that end before character `length - 1`.

    The last word may still change.
    """
    count = bisect.bisect_right(encoding.offsets, length - 1, key=itemgetter(1))
    while count > 0:
        word = encoding.token_to_word(count - 1)
        tokens = None if word is None else encoding.word_to_tokens(word)
        if tokens is None:
            return 0
        first, end = tokens
        if end <= count:
            return first
        count = first
    return 0
