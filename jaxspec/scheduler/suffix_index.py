"""SuffixIndex: where a text's newest tokens stood before, in it or in another, and what followed.

Longest matches are found by links, as compressors find them: each token links to the place where it
and the `g - 1` before it stood last, for some lengths `g`.

        text          a b c x a b c y a b c        the newest are "a b c"
        places              ^       ^              both matched 3 tokens; the last is the newest
        continuation                  y a b c      of one place each, the newest wins

A tree of all suffixes finds the same. But of texts that nobody repeats it has a node for each token
and length, for which Python has neither the memory nor the time.
"""

from array import array
from collections.abc import Sequence
from zlib import crc32

LENGTHS = (1, 3, 8)
"""Tokens of a run whose last place is known."""
MOST_PLACES = 16
"""Places that are compared, the newest of those with the longest such run."""
MOST_TOKENS = 2**19
"""Tokens that texts which have ended may have together; each takes 28 bytes."""
_BUCKETS = 2**18  # of the hash tables, one a length: 6 MB in all
_AGREEMENT = 16  # tokens that places which agree go on by at once


Place = tuple[array, int]
"""Where a run of tokens stood before: the tokens of its text, and the index behind the run."""


class Text:
    """The tokens of a request, and the links of each: codes of places, 0 for none."""

    def __init__(self, number: int):
        """Begin without a token."""
        self.number = number
        self.tokens = array("i")
        self.links = tuple(array("q") for _ in LENGTHS)


class SuffixIndex:
    """Texts that grow, and those that have ended, of which the oldest are forgotten first."""

    def __init__(self, depth: int, most_ended: int):
        """Match `depth` tokens at most, and keep `most_ended` texts once they have ended."""
        self._depth, self._most_ended = depth, most_ended
        self._levels = [level for level, length in enumerate(LENGTHS) if length <= depth]
        self._newest = [array("q", bytes(8 * _BUCKETS)) for _ in self._levels]  # place by hash
        self._texts: dict[int, Text] = {}
        self._ended: dict[int, int] = {}  # tokens by number, the oldest first
        self._num_ended_tokens = 0
        self._last_number = 0

    @property
    def num_tokens(self) -> int:
        """In all texts that are there."""
        return sum(len(text.tokens) for text in self._texts.values())

    def begin(self, tokens: Sequence[int], alike: Text | None = None) -> Text:
        """A new text. `alike`: one that begins with the same tokens, which count once then."""
        self._last_number += 1
        text = self._texts[self._last_number] = Text(self._last_number)
        if alike is not None and len(tokens) > 1:
            known = len(tokens) - 1  # the last one links to what followed in `alike`
            text.tokens.extend(tokens[:known])
            for links, others in zip(text.links, alike.links, strict=True):
                links.extend(others[:known])
            tokens = tokens[known:]
        self.extend(text, tokens)
        return text

    def extend(self, text: Text, tokens: Sequence[int]) -> None:
        """Add tokens to a text, and link each of them."""
        start, known = len(text.tokens), text.tokens
        known.extend(tokens)
        code = (text.number << 32) + start
        levels = list(zip(LENGTHS, text.links, self._newest, strict=False))  # as far as `depth`
        for end in range(start + 1, len(known) + 1):
            code += 1
            for length, links, newest in levels:
                if length > end:
                    links.append(0)
                    continue
                bucket = crc32(known[end - length : end]) % _BUCKETS
                links.append(newest[bucket])
                newest[bucket] = code

    def end(self, text: Text) -> None:
        """A text grows no more; old ones go where there are too many."""
        self._ended[text.number] = len(text.tokens)
        self._num_ended_tokens += len(text.tokens)
        while len(self._ended) > self._most_ended or self._num_ended_tokens > MOST_TOKENS:
            oldest = next(iter(self._ended))
            self._num_ended_tokens -= self._ended.pop(oldest)
            del self._texts[oldest]

    def places(self, text: Text) -> tuple[list[Place], int]:
        """The places of the longest match of a text's newest tokens, the newest first; its length.

        All that were compared match as long, and each goes on with a token.
        """
        for level in reversed(self._levels):
            length = LENGTHS[level]
            found = self._with_run(text, level, length) if length <= len(text.tokens) else []
            if found:
                matches = [self._matched(text.tokens, place, length) for place in found]
                longest = max(matches)
                pairs = zip(found, matches, strict=True)
                return [place for place, match in pairs if match == longest], longest
        return [], 0

    def _with_run(self, text: Text, level: int, length: int) -> list[Place]:
        """Places of a text's last `length` tokens."""
        code, run, found = text.links[level][-1], text.tokens[-length:], []
        for _ in range(MOST_PLACES):
            other = self._texts.get(code >> 32)
            if other is None:
                break  # nowhere, or in a text that is forgotten, with all that it links to
            end = code & 0xFFFFFFFF
            if end < len(other.tokens) and other.tokens[end - length : end] == run:
                found.append((other.tokens, end))
            code = other.links[level][end - 1]
        return found

    def _matched(self, tokens: array, place: Place, length: int) -> int:
        """Tokens before a place that are the newest of `tokens`; `length` of them are."""
        other, end = place
        most = min(self._depth, len(tokens), end)
        while length < most and tokens[-length - 1] == other[end - length - 1]:
            length += 1
        return length


def continuation(places: list[Place], length: int, least: float) -> list[int]:
    """The most frequent way on, `length` tokens at most; of equally frequent ones the newest.

    It ends where less than the share `least` of the places went on so, of those that went on.
    """
    path, share = list[int](), 1.0
    while len(places) > 1 and len(path) < length:
        ways: dict[int, list[Place]] = {}  # the newest first
        for tokens, end in places:
            if end < len(tokens):
                ways.setdefault(tokens[end], []).append((tokens, end + 1))
        if not ways:
            return path
        token, followers = max(ways.items(), key=_votes)
        if len(ways) > 1:
            share *= len(followers) / sum(map(len, ways.values()))
            if share < least:
                return path
        path.append(token)
        places = followers
        if len(ways) == 1:  # they may agree for longer
            path += (ahead := _agreed(places))
            places = [(tokens, end + len(ahead)) for tokens, end in places]
    for tokens, end in places[:1]:
        path += tokens[end : end + max(length - len(path), 0)]
    return path[:length]


def _votes(way: tuple[int, list[Place]]) -> int:
    return len(way[1])


def _agreed(places: list[Place]) -> array:
    """The next tokens, if all places go on by the same ones."""
    tokens, end = places[0]
    ahead = tokens[end : end + _AGREEMENT]
    agree = all(other[at : at + _AGREEMENT] == ahead for other, at in places)
    return ahead if agree else array("i")
