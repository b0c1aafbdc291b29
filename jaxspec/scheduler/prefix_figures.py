"""PrefixFigures: how often prefixes were found, what was kept, and why something was not."""

import dataclasses
from collections import Counter
from typing import Any


@dataclasses.dataclass
class PrefixFigures:
    """Counts of an engine's life. Tokens are those of prompts that enter for the first time."""

    num_queries: int = 0  # tokens that were looked up
    num_hits: int = 0  # tokens that were found
    num_without_state: int = 0  # tokens whose pages were found, and no state behind them
    num_resumed: int = 0  # tokens that preempted requests found
    num_checkpoints: int = 0  # states that were kept
    num_evicted_checkpoints: int = 0
    num_evicted_pages: int = 0
    skipped: Counter[str] = dataclasses.field(default_factory=Counter)  # by reason

    def of_request(self, num_tokens: int, num_cached: int, num_matched: int) -> None:
        """Count a request that enters for the first time."""
        self.num_queries += num_tokens
        self.num_hits += num_cached
        self.num_without_state += max(0, num_matched - num_cached)

    def told(self) -> dict[str, Any]:
        """All of them, by name."""
        return {**vars(self), "skipped": dict(self.skipped)}
