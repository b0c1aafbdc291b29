"""TokenFilter: the masks of logits processors that run on the host, for one request."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxspec.checks import are_integers, items, shown
from jaxspec.grammar.free_text import is_allowed, mask_of
from jaxspec.requests.logits_processors import HostLogitsProcessor

_LOG = logging.getLogger(__name__)


class TokenFilter:
    """Processors of one request with their arguments. It keeps no position."""

    def __init__(
        self,
        processors: Sequence[tuple[HostLogitsProcessor, Mapping[str, Any]]],
        vocab_size: int,
    ):
        self._processors, self._vocab_size = tuple(processors), vocab_size

    def limit(
        self, masks: np.ndarray, prompt: Sequence[int], output: Sequence[int], drafts: Sequence[int]
    ) -> None:
        """Clear the bits of ids that a processor does not allow, at each place.

        Place j follows the output and the first j drafts. Places after a draft that is masked, or
        no token id, stay as they are: they are never read.

        Args:
            masks: int32 [places, ceil(vocab_size / 32)].
            prompt: Token ids of the prompt.
            output: Token ids of the output.
            drafts: Drafts to verify next.
        """
        before = list(output)
        for place, mask in enumerate(masks[: 1 + len(drafts)]):
            if place:
                draft, last = drafts[place - 1], masks[place - 1]
                if not 0 <= draft < self._vocab_size or not is_allowed(draft, last):
                    return
                before.append(draft)
            for processor, args in self._processors:
                mask &= self._mask(processor, args, prompt, before)

    def _mask(
        self,
        processor: HostLogitsProcessor,
        args: Mapping[str, Any],
        prompt: Sequence[int],
        before: Sequence[int],
    ) -> np.ndarray:
        """Return the allowed ids; none after an exception, so that the request alone fails."""
        try:
            found = processor(tuple(prompt), tuple(before), dict(args))
            return mask_of(self._ids(found), self._vocab_size)
        except Exception:
            _LOG.exception("The logits processor %s failed; its request ends.", processor.name)
            return mask_of((), self._vocab_size)

    def _ids(self, found: Any) -> Sequence[int] | np.ndarray:
        if found is None:
            return np.arange(self._vocab_size)
        if isinstance(found, np.ndarray) and found.dtype == bool:
            if found.shape != (self._vocab_size,):
                raise ValueError(
                    f"A mask must have the shape ({self._vocab_size},), got {found.shape}."
                )
            return np.flatnonzero(found)
        ids = items(list(found) if isinstance(found, set | frozenset) else found, self._vocab_size)
        if ids is None or not are_integers(ids):
            raise ValueError(f"It must return token ids, a mask or None, got {shown(found)}.")
        if wrong := [token for token in ids if not 0 <= token < self._vocab_size]:
            raise ValueError(f"Ids must be below {self._vocab_size}, got {shown(wrong[0])}.")
        return list(map(int, ids))
