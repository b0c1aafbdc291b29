"""SuffixIndex: earlier occurrences of the newest tokens of a text, and their continuations.

Longest matches are found by links, as in LZ77 compressors: for some lengths `g`, each token links
to the last place at which it and the `g - 1` tokens before it occurred.

        text          a b c x a b c y a b c        the newest tokens are "a b c"
        places              ^       ^              both match 3 tokens
        continuation                  y a b c      both are equally frequent, the newest wins

A suffix tree finds the same matches. But without repetitions it has a node for each token and
length, for which Python has neither the memory nor the time.
"""

from array import array
from collections.abc import Sequence
from zlib import crc32

from jaxspec.options import SpeculativeConfig
from jaxspec.requests.request import Request
from jaxspec.scheduler.host_drafter import HostDrafter, Path

LENGTHS = (1, 3, 8)
"""Lengths of the runs of tokens that are linked to their last place."""
MOST_PLACES = 16
"""Most places that are compared, the newest ones with the longest linked run."""
MOST_TOKENS = 2**19
"""Most tokens of all ended texts; each takes 28 bytes."""
_BUCKETS = 2**18  # buckets per hash table; one table per length, 6 MB in total
_AGREEMENT = 16  # tokens compared at once while all places agree


Place = tuple[array, int]
"""An earlier place of a run of tokens: the tokens of its text, and the index after the run."""


class Text:
    """Tokens of a request, and the links of each: codes of places, 0 for none."""

    def __init__(self, number: int):
        self.number = number
        self.tokens = array("i")
        self.links = tuple(array("q") for _ in LENGTHS)


class SuffixIndex:
    """Index of growing texts and of ended ones, of which the oldest are evicted."""

    def __init__(self, depth: int, most_ended: int):
        """Create an index of matches up to `depth` tokens and of `most_ended` ended texts."""
        self._depth, self._most_ended = depth, most_ended
        self._levels = [level for level, length in enumerate(LENGTHS) if length <= depth]
        self._newest = [array("q", bytes(8 * _BUCKETS)) for _ in self._levels]  # codes by hash
        self._texts: dict[int, Text] = {}
        self._ended: dict[int, int] = {}  # number of tokens by text number, oldest first
        self._num_ended_tokens = 0
        self._last_number = 0

    @property
    def num_tokens(self) -> int:
        return sum(len(text.tokens) for text in self._texts.values())

    def begin(self, tokens: Sequence[int], alike: Text | None = None) -> Text:
        """Add a text and return it.

        `alike` is a text that begins with the same tokens, whose links are copied, so that the
        shared tokens count as one place.
        """
        self._last_number += 1
        text = self._texts[self._last_number] = Text(self._last_number)
        if alike is not None and len(tokens) > 1:
            known = len(tokens) - 1  # the last token gets new links, to its place in `alike`
            text.tokens.extend(tokens[:known])
            for links, others in zip(text.links, alike.links, strict=True):
                links.extend(others[:known])
            tokens = tokens[known:]
        self.extend(text, tokens)
        return text

    def extend(self, text: Text, tokens: Sequence[int]) -> None:
        """Append tokens to a text and link each of them."""
        start, known = len(text.tokens), text.tokens
        known.extend(tokens)
        code = (text.number << 32) + start
        levels = list(zip(LENGTHS, text.links, self._newest, strict=False))  # lengths up to `depth`
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
        """Mark a text as ended, and evict the oldest ended texts above the limits."""
        self._ended[text.number] = len(text.tokens)
        self._num_ended_tokens += len(text.tokens)
        while len(self._ended) > self._most_ended or self._num_ended_tokens > MOST_TOKENS:
            oldest = next(iter(self._ended))
            self._num_ended_tokens -= self._ended.pop(oldest)
            del self._texts[oldest]

    def places(self, text: Text) -> tuple[list[Place], int]:
        """Return the places with the longest match of a text's newest tokens, and its length.

        The newest place comes first. Each place is followed by at least one token.
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
        code, run, found = text.links[level][-1], text.tokens[-length:], []
        for _ in range(MOST_PLACES):
            other = self._texts.get(code >> 32)
            if other is None:
                break  # no place, or in an evicted text, as are all places that it links to
            end = code & 0xFFFFFFFF
            if end < len(other.tokens) and other.tokens[end - length : end] == run:
                found.append((other.tokens, end))
            code = other.links[level][end - 1]
        return found

    def _matched(self, tokens: array, place: Place, length: int) -> int:
        """Return the length of the match before a place, of which `length` tokens are known."""
        other, end = place
        most = min(self._depth, len(tokens), end)
        while length < most and tokens[-length - 1] == other[end - length - 1]:
            length += 1
        return length


def continuation(places: list[Place], length: int, least: float) -> list[int]:
    """Return the most frequent continuation, at most `length` tokens; the newest among equals.

    It ends where the share of places that agree with it, of those that continue, is below `least`.
    """
    path, share = list[int](), 1.0
    while len(places) > 1 and len(path) < length:
        ways: dict[int, list[Place]] = {}  # places by next token, newest first
        for tokens, end in places:
            if end < len(tokens):
                ways.setdefault(tokens[end], []).append((tokens, end + 1))
        if not ways:
            return path
        token, forked = max(ways.items(), key=_votes)
        if len(ways) > 1:
            share *= len(forked) / sum(map(len, ways.values()))
            if share < least:
                return path
        path.append(token)
        places = forked
        if len(ways) == 1:  # the next tokens may agree as well
            path += (ahead := _agreed(places))
            places = [(tokens, end + len(ahead)) for tokens, end in places]
    for tokens, end in places[:1]:
        path += tokens[end : end + max(length - len(path), 0)]
    return path[:length]


def _votes(way: tuple[int, list[Place]]) -> int:
    return len(way[1])


def _agreed(places: list[Place]) -> array:
    """Return the next tokens if they are equal at all places, else none."""
    tokens, end = places[0]
    ahead = tokens[end : end + _AGREEMENT]
    agree = all(other[at : at + _AGREEMENT] == ahead for other, at in places)
    return ahead if agree else array("i")


class SuffixDrafter(HostDrafter):
    """Drafts from the tokens of all running requests and of the last ended ones."""

    def __init__(self, depth: int, most_ended: int, least_share: float):
        self._sizes, self._least_share = (depth, most_ended), least_share
        self.clear()

    @classmethod
    def from_config(cls, config: SpeculativeConfig) -> "SuffixDrafter":
        options = config.options
        return cls(
            options.suffix_decoding_max_tree_depth,
            options.suffix_decoding_max_cached_requests,
            options.suffix_decoding_min_token_prob,
        )

    def clear(self) -> None:
        self.index = SuffixIndex(*self._sizes)
        self._texts: dict[Request, Text] = {}

    def add(self, request: Request) -> None:
        """Index a request; a prompt shared with its parent is counted once."""
        if request not in self._texts:
            parent = self._texts.get(request.parent) if request.parent else None
            self._texts[request] = self.index.begin(request.tokens, parent)

    def extend(self, request: Request, tokens: Sequence[int]) -> None:
        self.index.extend(self._texts[request], tokens)

    def remove(self, request: Request) -> None:
        text = self._texts.pop(request, None)
        if text is not None:
            self.index.end(text)

    def path(self, request: Request, length: int) -> Path:
        places, match = self.index.places(self._texts[request])
        return Path(continuation(places, length, self._least_share), match)
