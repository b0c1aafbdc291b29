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
from collections.abc import Collection, Mapping, Sequence
from operator import itemgetter
from typing import Any

from tokenizers import Encoding

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


def num_stable_tokens(encoding: Encoding, length: int, added_ids: Collection[int]) -> int:
    """How many tokens stay whatever comes behind the first `length` characters of their text.

    Tokenizers look for `added_ids`, such as those that begin a message, before anything else. So
    the tokens in front of one and the token itself stay. What lies between two of them is split
    into words, each on its own, by rules that look one character ahead: what is in front of a word
    stays if the text goes on behind that word.
    """
    offsets, ids = encoding.offsets, encoding.ids
    whole = bisect.bisect_right(offsets, length, key=itemgetter(1))
    added = next((n for n in range(whole, 0, -1) if ids[n - 1] in added_ids), 0)
    inner = bisect.bisect_right(offsets, length - 1, key=itemgetter(1))
    return max(added, _last_word(encoding, inner))


def _last_word(encoding: Encoding, count: int) -> int:
    """Where the last word begins that lies in the first `count` tokens; 0: there is none."""
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
