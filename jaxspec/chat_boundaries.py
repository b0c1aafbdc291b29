"""Chat boundaries: up to where the prompt of a conversation stays the same when the talk goes on.

Most templates write a message otherwise once others came behind it: they drop what was thought, and
a prompt for an answer is not how an answer begins. So a prompt and its output are often no prefix
of the next prompt. Whatever the template, it tells itself: it writes the conversation once more
with a turn behind it, and what both texts begin with is what stays.

    <user>Hi</user><assistant><think>          the prompt of this turn
    <user>Hi</user><assistant>x<user>x</user>  the conversation with a turn behind it
    <user>Hi</user><assistant>                 stays; its tokens do up to the last one that must
"""

import bisect
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import itemgetter
from typing import Any

from tokenizers import Encoding

MAX_PART = 2**16
"""The longest part of a text, in characters, that has its tokens made once more."""
_ID = "call00000"  # some templates ask for nine letters or digits
_USER = {"role": "user", "content": "x"}
_ANSWER = {"role": "assistant", "content": "x", "reasoning_content": "x", "thinking": "x"}
_CALL = {"id": _ID, "type": "function", "function": {"name": "x", "arguments": {}}}
_RESULT = {"role": "tool", "content": "x", "tool_call_id": _ID, "name": "x"}


def follow_ups(
    messages: Sequence[Mapping[str, Any]], *, has_tools: bool
) -> list[list[dict[str, Any]]]:
    """Turns that may come behind a conversation, each as the messages that it adds.

    An answer and what the user says next; and where there are tools, a call and its result.
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
    """Tokens that a tokenizer looks for before anything else, such as those that begin a message.

    They split a text: what is in front of one has tokens of its own. What lies between two of them
    is split into words, by rules that look one character ahead: what is in front of a word stays if
    the text goes on behind the word.
    """

    def __init__(self, ids: Mapping[str, int]):
        """Know their ids by what they stand for."""
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
        """How many tokens of a text stay whatever comes behind its first `lengths` characters.

        `ids` are those of the text. `encode` is given no more than the part behind an added token,
        of `MAX_PART` characters at most; if there are more, it is the added token that counts.

        Returns the counts in order, each once, without 0.
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
        """Whether the text may have it without the token, as a line's end in a longer run."""
        return any(content in other for other in self._ids if len(other) > len(content))

    def _num_open(self, text: str, length: int) -> int:
        """How many of the last of so many characters may become an added token with the next."""
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
    """Where an id stands, of which there are so many behind; 0 if there are fewer."""
    backwards = (n for n in range(len(ids) - 1, -1, -1) if ids[n] == wanted)
    return next(itertools.islice(backwards, skipped, None), 0)


def _last_word(encoding: Encoding, length: int) -> int:
    """How many tokens belong to words that end before character `length - 1`.

    The word at the end may still change.
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
