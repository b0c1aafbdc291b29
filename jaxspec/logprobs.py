"""Logprobs: how the device reports them, and how users read them. No JAX here."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from jaxspec.layout import Field, PackedLayout
from jaxspec.sampling_params import MAX_LOGPROBS

LAYOUT = PackedLayout(
    [
        Field("logit", "Of the token itself, before any processor.", dtype=np.float32),
        Field("rank", "1 + the number of ids with a larger logit."),
        Field("log_total", "Logarithm of the sum of exp(logit - largest).", dtype=np.float32),
        Field("top_ids", "Those of the largest logits, -1 behind the last.", shape=(MAX_LOGPROBS,)),
        Field("top_logits", "Theirs, descending.", shape=(MAX_LOGPROBS,), dtype=np.float32),
    ]
)
"""What is reported of one token. Logits, because differences of them round to equal numbers."""


class Logprob(NamedTuple):
    """An id's log-probability in its place, by the model itself.

    It is the logarithm of the softmax of the model's logits, before temperature, top-k and all
    else that a request asks for.
    """

    logprob: float
    rank: int | None = None  # 1 + the number of ids that are likelier
    decoded_token: str | None = None  # the id's text, decoded alone; None without a tokenizer


def readable(
    rows: Sequence[np.ndarray],
    tokens: Sequence[int],
    num_top: int,
    text_of: Callable[[int], str] | None,
) -> list[dict[int, Logprob]]:
    """For each of `tokens`, by id: its own logprob first, then those of the `num_top` likeliest.

    `rows`: what was reported of each token, int32 `[LAYOUT.size]`. `text_of`: the text of an id.
    """
    if not len(rows):
        return []
    texts: dict[int, str | None] = {}

    def logprob(token: int, value: float, rank: int) -> Logprob:
        if token not in texts:
            texts[token] = text_of(token) if text_of else None
        return Logprob(value, rank, texts[token])

    fields = LAYOUT.unpack(np.stack(rows))
    top_logits = fields["top_logits"]
    largest, log_total = top_logits[:, :1], fields["log_total"][:, None]
    with np.errstate(invalid="ignore"):  # an infinite logit has no log-probability
        own = (fields["logit"][:, None] - largest - log_total)[:, 0]
        top = top_logits - largest - log_total
    found = []
    columns = (own, fields["rank"], fields["top_ids"], top, top_logits)
    for token, *values in zip(tokens, *(each.tolist() for each in columns), strict=True):
        own_value, rank, top_ids, top_values, logits = values
        entry = {token: logprob(token, own_value, rank)}
        for other, value, logit in zip(top_ids[:num_top], top_values, logits, strict=False):
            if other >= 0 and other != token:
                entry[other] = logprob(other, value, 1 + logits.index(logit))
        found.append(entry)
    return found
