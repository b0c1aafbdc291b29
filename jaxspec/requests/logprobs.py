"""Logprobs: the packed format of the device, and its conversion to dictionaries for users."""

import functools
from collections.abc import Callable, Iterable, Sequence
from itertools import islice, repeat
from typing import Any, NamedTuple

import numpy as np

from jaxspec.layout import Field, PackedLayout
from jaxspec.requests.sampling_params import MAX_LOGPROBS

LAYOUT = PackedLayout(
    [
        Field("logit", "Of the token itself, before any processor.", dtype=np.float32),
        Field("rank", "1 + the number of ids with a larger logit."),
        Field("log_total", "Logarithm of the sum of exp(logit - largest).", dtype=np.float32),
        Field(
            "top_ids",
            "Those of the largest logits, then -1; -1 alone if no row of the step lists any.",
            shape=(MAX_LOGPROBS,),
        ),
        Field("top_logits", "Theirs, descending.", shape=(MAX_LOGPROBS,), dtype=np.float32),
    ]
)
"""Packed report of one token. It has logits, not logprobs: their differences round equally."""


class Logprob(NamedTuple):
    """Log-probability of one token id at one position.

    It is the log-softmax of the model's logits, before temperature, penalties, top-k and any other
    processor of the request.
    """

    logprob: float
    rank: int | None = None  # 1 + number of likelier ids
    decoded_token: str | None = None  # text of the id decoded alone; None without a tokenizer


def readable(
    rows: Sequence[np.ndarray],
    tokens: Sequence[int],
    num_top: int,
    text_of: Callable[[int], str] | None,
) -> list[dict[int, Logprob]]:
    """Return a dictionary of logprobs by id for each of `tokens`.

    Each has the token itself first, then the `num_top` likeliest ids at its position.

    Args:
        rows: Report of each token, int32 `[LAYOUT.size]`.
        tokens: Token ids, one per row.
        num_top: Number of likeliest ids, at most `MAX_LOGPROBS`.
        text_of: Decodes a single id; None leaves `decoded_token` None.
    """
    if not len(rows):
        return []
    bits = np.stack(rows)
    reals = bits.view(np.float32)
    num_real = int(np.count_nonzero(bits[0, _TOP_IDS] >= 0))  # fewer in a small vocabulary
    num_top = min(num_top, num_real)
    top_logits = reals[:, _TOP_LOGITS][:, :num_top]
    values = _normalised(np.concatenate([reals[:, _LOGIT], top_logits], axis=1), reals)
    ranks = np.empty(values.shape, np.int64)
    ranks[:, 0] = bits[:, _RANK.start]
    ranks[:, 1:] = places = np.arange(1, num_top + 1)
    is_equal = top_logits[:, 1:] == top_logits[:, :-1]
    if is_equal.any():  # equal logits share the rank of the first of them
        first = np.where(is_equal, 0, places[1:])
        ranks[:, 2:] = np.maximum(1, np.maximum.accumulate(first, axis=1))
    shown = np.empty(values.shape, np.int64)
    shown[:, 0] = tokens
    shown[:, 1:] = bits[:, _TOP_IDS][:, :num_top]
    ids = shown.ravel().tolist()
    columns = zip(
        values.ravel().tolist(), ranks.ravel().tolist(), _texts(ids, text_of), strict=True
    )
    pairs = zip(ids, map(_make, columns), strict=True)
    # If the token is also among the likeliest, both places hold equal entries: the dict has one.
    return [dict(islice(pairs, num_top + 1)) for _ in rows]


def token_logprobs(rows: Sequence[np.ndarray]) -> np.ndarray:
    """Return the log-probability of each token itself (float32), for rows as in `readable`."""
    if not len(rows):
        return np.zeros(0, np.float32)
    reals = np.stack(rows).view(np.float32)
    return _normalised(reals[:, _LOGIT], reals)[:, 0]


def _normalised(logits: np.ndarray, reals: np.ndarray) -> np.ndarray:
    """Return the log-probabilities of `logits`, a row per row of reports."""
    with np.errstate(invalid="ignore"):  # an infinite logit has no log-probability
        return logits - reals[:, _TOP_LOGITS.start, None] - reals[:, _LOG_TOTAL]


_LOGIT, _RANK, _LOG_TOTAL, _TOP_IDS, _TOP_LOGITS = (
    LAYOUT.slices[name] for name in ("logit", "rank", "log_total", "top_ids", "top_logits")
)
_make = functools.partial(tuple.__new__, Logprob)  # takes half the time of `Logprob(...)`


def _texts(ids: list[int], text_of: Callable[[int], str] | None) -> Iterable[str | None]:
    if text_of is None:
        return repeat(None, len(ids))
    texts = {token: text_of(token) for token in set(ids)}
    return [texts[token] for token in ids]


class Deferred(NamedTuple):
    """Logprobs that are built on first access."""

    make: Callable[[], Any]
    rows: Sequence[np.ndarray]  # the reports that they are built from


def none() -> None:
    """Return None: as a `default_factory` it sets no class attribute, unlike `default=None`."""


class DeferredLogprobs:
    """Base of dataclasses whose field `logprobs` may be passed as `Deferred`.

    Building the dictionaries takes the host longer than the device takes to report the logprobs,
    and many are never read.
    """

    def __post_init__(self) -> None:
        """Move a deferred field to `_deferred`, so that reading it calls `__getattr__`."""
        fields = self.__dict__
        if type(fields["logprobs"]) is Deferred:
            fields["_deferred"] = fields.pop("logprobs")

    @property
    def token_logprobs(self) -> np.ndarray | None:
        """Log-probability of each token itself (float32), without building `logprobs`.

        None if `logprobs` is None.
        """
        deferred = self.__dict__.get("_deferred")
        if deferred is not None:
            return token_logprobs(deferred.rows)
        if self.logprobs is None:
            return None
        return np.array([next(iter(x.values())).logprob for x in self.logprobs], np.float32)

    def __getattr__(self, name: str) -> Any:
        """Build `logprobs` and store it."""
        deferred = self.__dict__.get("_deferred") if name == "logprobs" else None
        if deferred is None:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        made = self.__dict__["logprobs"] = deferred.make()
        self.__dict__.pop("_deferred", None)
        return made

    def __getstate__(self) -> dict[str, Any]:
        """Return the fields with `logprobs` built, because a `Deferred` may not be picklable."""
        made = self.logprobs
        return {name: x for name, x in self.__dict__.items() if name != "_deferred"} | {
            "logprobs": made
        }
