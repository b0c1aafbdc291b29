"""Longest matches and what follows them: against a slow oracle, and within bounds."""

import numpy as np
import pytest

from jaxspec.scheduler import suffix_index
from jaxspec.scheduler.suffix_index import LENGTHS, MOST_PLACES, SuffixIndex, continuation


class Oracle:
    """All tokens of all texts, each with the moment in which it came."""

    def __init__(self, depth):
        self.depth, self.texts, self.came = depth, [], []

    def extend(self, text, tokens):
        for token in tokens:
            self.texts[text].append(token)
            self.came.append((text, len(self.texts[text])))

    def places(self, text):
        """(text, end) of the longest matches of a text whose newest token came last."""
        tokens = self.texts[text]
        for run in sorted(LENGTHS, reverse=True):
            if run > min(self.depth, len(tokens)):
                continue
            same = [
                (other, end)
                for other, end in reversed(self.came[:-1])
                if end >= run and self.texts[other][end - run : end] == tokens[-run:]
            ]
            found = [(o, end) for o, end in same[:MOST_PLACES] if end < len(self.texts[o])]
            if found:
                matches = [self.match(tokens, *place) for place in found]
                longest = max(matches)
                pairs = zip(found, matches, strict=True)
                return [place for place, match in pairs if match == longest], longest
        return [], 0

    def match(self, tokens, other, end):
        count = 0
        while (
            count < min(self.depth, len(tokens), end)
            and tokens[-1 - count] == self.texts[other][end - 1 - count]
        ):
            count += 1
        return count

    def path(self, places, length, least):
        path, share = [], 1.0
        while len(path) < length:
            ahead = [
                self.texts[text][end + len(path)]
                for text, end in places
                if self.texts[text][end : end + len(path)] == path
                and end + len(path) < len(self.texts[text])
            ]
            if not ahead:
                break
            token = max(ahead, key=ahead.count)  # the first of equals, which is the newest
            share *= ahead.count(token) / len(ahead)
            if share < least:
                break
            path.append(token)
        return path


@pytest.mark.parametrize("depth", [1, 2, 3, 10, 24])
@pytest.mark.parametrize("ids", [1, 2, 5, 40])
def test_the_longest_match_then_the_most_frequent_way_on(depth, ids):
    rng = np.random.default_rng(10 * ids + depth)
    index, oracle, texts, lengths = SuffixIndex(depth, 99), Oracle(depth), [], set()
    for _ in range(150):
        which, tokens = int(rng.integers(6)), rng.integers(0, ids, rng.integers(1, 9)).tolist()
        if texts and rng.random() < 0.5:  # a piece of an earlier text
            source = oracle.texts[int(rng.integers(len(texts)))]
            at = int(rng.integers(len(source)))
            tokens = source[at : at + 20]
        if which >= len(texts):
            texts.append(index.begin([]))
            oracle.texts.append([])
            which = len(texts) - 1
        index.extend(texts[which], tokens)
        oracle.extend(which, tokens)
        places, match = index.places(texts[which])
        want, longest = oracle.places(which)
        assert match == longest and len(places) == len(want)
        for least in (0.0, 0.1, 0.6):
            path = continuation(places, 30, least)
            assert path == oracle.path(want, 30, least)
            lengths.add(len(path))
        assert continuation(places, 3, 0.1) == continuation(places, 30, 0.1)[:3]
    assert len(lengths) > 5


def test_a_way_that_few_places_went_is_not_gone():
    index = SuffixIndex(4, 99)
    for tokens in ([7, 1, 2], [7, 1, 3], [7, 1, 2], [7, 1, 4]):
        index.end(index.begin(tokens))
    places, match = index.places(index.begin([7]))
    assert match == 1
    assert [continuation(places, 5, least) for least in (0.5, 0.6)] == [[1, 2], [1]]


def test_a_text_that_begins_as_another_does_not_count_twice():
    index = SuffixIndex(4, 99)
    first = index.begin([5, 6, 7, 5, 6])
    second = index.begin([5, 6, 7, 5, 6], alike=first)
    assert second.tokens == first.tokens
    assert [continuation(index.places(text)[0], 9, 0) for text in (first, second)] == [
        [7, 5, 6]
    ] * 2
    index.extend(first, [9])
    third = index.begin([5, 6, 7, 5, 6], alike=first)
    assert index.places(third)[1] == 4  # what the first one got
    assert continuation(index.places(third)[0], 9, 0) == [9]


@pytest.mark.parametrize("most_ended", [0, 1, 7])
def test_the_oldest_texts_are_forgotten(most_ended):
    index = SuffixIndex(8, most_ended)
    for first in range(20):
        index.end(index.begin(range(100 * first, 100 * first + 10)))
    assert index.num_tokens == 10 * most_ended
    paths = [
        continuation(index.places(index.begin([100 * first + 3]))[0], 3, 0) for first in range(20)
    ]
    known = [[100 * first + 4, 100 * first + 5, 100 * first + 6] for first in range(20)]
    assert paths == [[]] * (20 - most_ended) + known[20 - most_ended :]


def test_tokens_are_bounded_too(monkeypatch):
    monkeypatch.setattr(suffix_index, "MOST_TOKENS", 100)
    index = SuffixIndex(8, 10**6)
    for _ in range(50):
        index.end(index.begin(range(30)))
        assert index.num_tokens <= 100
    index.end(index.begin(range(500)))  # alone too long
    assert index.num_tokens == 0


def test_other_tokens_of_an_equal_hash_are_no_match(monkeypatch):
    monkeypatch.setattr(suffix_index, "_BUCKETS", 1)
    index = SuffixIndex(8, 99)
    index.end(index.begin([1, 2, 3, 4, 5, 6]))
    text = index.begin([9, 3])
    places, match = index.places(text)
    assert match == 1 and continuation(places, 2, 0) == [4, 5]
