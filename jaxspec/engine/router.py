"""Routing of requests to replicas: by cached prefix, then by tokens in flight."""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

BLOCK_TOKENS = 32
"""Tokens per entry of the index; a shorter rest of a prompt is not indexed."""
MAX_BLOCKS = 2**17
"""Most entries of the index: 4 million tokens, some 20 MB."""
MARGIN = 8192
"""Tokens in flight by which a replica with the prefix may exceed the least loaded one."""
OUTPUT_TOKENS = 512
"""Most output tokens of a sample that count as in flight: few requests use all they may."""


class Route(NamedTuple):
    """A replica, and the tokens that a request adds to those in flight there."""

    replica: int
    num_tokens: int


class Router:
    """Chooses the replica of each request.

    The replica with the longest cached prefix is chosen, among those whose tokens in flight exceed
    the least loaded one's by a margin at most; of equals the least loaded one.

    Cached prefixes are estimated from the prompts sent to each replica, by an index of hashed
    blocks of tokens. The key of a block is the hash of its tokens and the key before it; the first
    has the cache salt. A replica may have evicted a prefix, and an entry may be forgotten earlier.

        prompt    0..31   32..63   64..95        replicas 0 and 1 have 64 tokens of it,
        entry     {0, 1}  {0, 1}   {1}           replica 1 has 96

    Used by one thread.
    """

    def __init__(self, *, margin: int = MARGIN, max_blocks: int = MAX_BLOCKS):
        """Start without replicas."""
        self._margin, self._max_blocks = margin, max_blocks
        self._in_flight: dict[int, int] = {}  # tokens, by replica that takes requests
        self._blocks = OrderedDict[int, int]()  # replicas as bits, by key; the last used one last

    def add(self, replica: int) -> None:
        """Route requests to a replica, which has nothing cached."""
        self._in_flight[replica] = 0

    def remove(self, replica: int) -> None:
        """Route no more requests to a replica, and forget what it had."""
        self._in_flight.pop(replica, None)
        self._blocks = OrderedDict(
            (key, left) for key, bits in self._blocks.items() if (left := bits & ~(1 << replica))
        )

    def forget_prefixes(self) -> None:
        self._blocks.clear()

    def route(
        self, prompt: Sequence[int], salt: str | None, num_output: int, num_samples: int = 1
    ) -> Route | None:
        """Return the replica of a request and count its tokens there; None without replicas.

        Args:
            prompt: Token ids.
            salt: Cache salt.
            num_output: Most output tokens of a sample.
            num_samples: Samples of the prompt, which share its prefix.
        """
        if not self._in_flight:
            return None
        keys = list(_keys_of(prompt, salt))
        cached = self._cached_tokens(keys)
        least = min(self._in_flight.values())
        replica = min(
            (each for each, load in self._in_flight.items() if load <= least + self._margin),
            key=lambda each: (-cached[each], self._in_flight[each], each),
        )
        self._note(keys, replica)
        num_tokens = len(prompt) + num_samples * min(num_output, OUTPUT_TOKENS)
        self._in_flight[replica] += num_tokens
        return Route(replica, num_tokens)

    def over(self, route: Route) -> None:
        """Remove a finished request from the tokens in flight of its replica."""
        if route.replica in self._in_flight:
            self._in_flight[route.replica] -= route.num_tokens

    def _cached_tokens(self, keys: Sequence[int]) -> dict[int, int]:
        """Return the estimated length of each replica's cached prefix."""
        found = dict.fromkeys(self._in_flight, 0)
        having = ~0
        for number, key in enumerate(keys, 1):
            having &= self._blocks.get(key, 0)
            if not having:
                break
            for replica in found:
                if having >> replica & 1:
                    found[replica] = number * BLOCK_TOKENS
        return found

    def _note(self, keys: Sequence[int], replica: int) -> None:
        for key in reversed(keys):  # so that the ends of prompts are forgotten first
            self._blocks[key] = self._blocks.get(key, 0) | 1 << replica
            self._blocks.move_to_end(key)
        while len(self._blocks) > self._max_blocks:
            self._blocks.popitem(last=False)


def _keys_of(prompt: Sequence[int], salt: str | None) -> Iterator[int]:
    key = hash(salt)
    for start in range(0, len(prompt) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
        key = hash((key, tuple(prompt[start : start + BLOCK_TOKENS])))
        yield key
