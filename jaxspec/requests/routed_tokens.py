"""RoutedTokens: the experts of a request's tokens, copied from its pages."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Integer

Experts = Integer[np.ndarray, "tokens layers top_k"]


@dataclasses.dataclass(frozen=True, eq=False)
class RoutedTokens:
    """Copies of a request's pages, `[pages, page_size, layers, top_k]`, that may be in flight."""

    copies: Sequence[Any]

    @property
    def is_ready(self) -> bool:
        """True if `first` would not wait."""
        return all(isinstance(copy, np.ndarray) or copy.is_ready() for copy in self.copies)

    def first(self, num_tokens: int) -> Experts:
        """Return the experts of the first tokens; wait for the copies."""
        parts = [np.asarray(copy) for copy in self.copies]
        tokens = [part.reshape(part.shape[0] * part.shape[1], *part.shape[2:]) for part in parts]
        return np.concatenate(tokens)[:num_tokens]

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle NumPy arrays; another process may have no device."""
        return RoutedTokens, ([np.asarray(copy) for copy in self.copies],)
