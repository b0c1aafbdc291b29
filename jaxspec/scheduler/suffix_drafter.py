"""SuffixDrafter: a request goes on as the longest match of its newest tokens did."""

from collections.abc import Sequence

from jaxspec.request import Request
from jaxspec.scheduler.host_drafter import HostDrafter, Path
from jaxspec.scheduler.suffix_index import SuffixIndex, Text, continuation
from jaxspec.speculation import SpeculativeConfig


class SuffixDrafter(HostDrafter):
    """Over the tokens of all requests that run, and of the last ones that have ended."""

    def __init__(self, depth: int, most_ended: int, least_share: float):
        """See `SuffixOptions`."""
        self._sizes, self._least_share = (depth, most_ended), least_share
        self.clear()

    @classmethod
    def from_config(cls, config: SpeculativeConfig) -> "SuffixDrafter":
        """A drafter with the options of `config`."""
        options = config.options
        return cls(
            options.suffix_decoding_max_tree_depth,
            options.suffix_decoding_max_cached_requests,
            options.suffix_decoding_min_token_prob,
        )

    def clear(self) -> None:
        """See `HostDrafter.clear`."""
        self.index = SuffixIndex(*self._sizes)
        self._texts: dict[Request, Text] = {}

    def add(self, request: Request) -> None:
        """See `HostDrafter.add`. The prompt of a leader counts for its samples too."""
        if request not in self._texts:
            leader = self._texts.get(request.leader) if request.leader else None
            self._texts[request] = self.index.begin(request.tokens, leader)

    def extend(self, request: Request, tokens: Sequence[int]) -> None:
        """See `HostDrafter.extend`."""
        self.index.extend(self._texts[request], tokens)

    def remove(self, request: Request) -> None:
        """See `HostDrafter.remove`."""
        text = self._texts.pop(request, None)
        if text is not None:
            self.index.end(text)

    def path(self, request: Request, length: int) -> Path:
        """See `HostDrafter.path`."""
        places, match = self.index.places(self._texts[request])
        return Path(continuation(places, length, self._least_share), match)
