"""What a request's parameters make of a row of scores, by its whole prefix: NumPy, one token."""

import jax.numpy as jnp
import numpy as np

from jaxspec.plan.row import row_layout, write_row
from jaxspec.plan.table_plan import pack_tables
from jaxspec.requests.request import Request
from jaxspec.sampling import SamplingInputs
from jaxspec.sampling.tables import SamplingTables


def by_prefix(scores, params, prompt, output, stop_ids=(), bad_words=()):
    """`scores` (float64) after masks, biases and penalties, where `output` came so far."""
    scores = np.array(scores, np.float64)
    for token, bias in (params.logit_bias or {}).items():
        scores[token] += bias
    forbidden = set(stop_ids) if len(output) < params.min_tokens else set()
    if params.allowed_token_ids is not None:
        forbidden |= set(range(len(scores))) - set(params.allowed_token_ids)
    for *start, end in bad_words:
        if list(output[len(output) - len(start) :]) == start and len(output) >= len(start):
            forbidden.add(end)
    scores[list(forbidden)] = -np.inf
    for token in {*prompt, *output}:
        factor = params.repetition_penalty
        scores[token] = scores[token] / factor if scores[token] > 0 else scores[token] * factor
    for token in output:
        scores[token] -= params.frequency_penalty
    for token in {*output}:
        scores[token] -= params.presence_penalty
    return scores


def by_min_p(scores, min_p):
    """`scores` with -inf where the softmax is below `min_p` times its largest."""
    share = np.exp(scores - scores.max())
    return np.where(share < min_p, -np.inf, scores)


class Prefixes:
    """Requests in the middle of a verify, as the device's sampling sees them. Slots count from 1.

    Each is (prompt, output, params, stop_ids, bad_words). The last `width` tokens are those of the
    step, and the tables know all before them.
    """

    def __init__(self, requests, width, vocab):
        self.requests, self.width, self.vocab = requests, width, vocab

    def inputs(self) -> SamplingInputs:
        count, layout = len(self.requests), row_layout(0)
        entries = np.zeros((count, layout.size), np.int32)
        tables = SamplingTables.empty(count + 1, self.vocab, 100, self.width)
        seen, bias = tables.seen, tables.bias
        tokens = np.zeros((count, self.width), np.int32)
        computed = np.zeros(count, np.int32)
        for row, (prompt, output, params, stop_ids, words) in enumerate(self.requests):
            request = Request(tuple(prompt), params, row, tuple(stop_ids), bad_words=words)
            request.slot, request.prefill_len = row + 1, len(prompt)
            write_row(entries[row], request, layout)
            if request.has_tables:
                bias = bias.with_slot(jnp.asarray(pack_tables(request, self.vocab)))
            whole = np.array([*prompt, *output], np.int32)
            tokens[row], computed[row] = whole[len(whole) - self.width :], len(whole) - self.width
            index = np.arange(computed[row], dtype=np.int32)
            known, slots = whole[: computed[row]], np.full(computed[row], row + 1, np.int32)
            true = np.ones(len(known), bool)
            seen = seen.with_tokens(slots, known, index < len(prompt), true)
            newest = slice(max(0, len(known) - 32), None)
            here = slots * (1 if request.has_tables else 0)
            bias = bias.with_tokens(here[newest], known[newest], index[newest])
        columns = layout.unpack(entries) | {"num_computed": computed}
        columns = {name: jnp.asarray(column) for name, column in columns.items()}
        return SamplingInputs(columns, SamplingTables(seen, bias), jnp.asarray(tokens))

    def positions(self) -> np.ndarray:
        """The index in its request of the token to draw at each place. int32 [rows, width]"""
        ends = [len(prompt) + len(output) for prompt, output, *_ in self.requests]
        return np.int32(ends)[:, None] - self.width + 1 + np.arange(self.width, dtype=np.int32)

    def expected(self, logits) -> np.ndarray:
        """What `by_prefix` makes of `logits` `[rows, width, vocab]` at each place."""
        found = np.array(logits, np.float64)
        for row, (prompt, output, params, stop_ids, words) in enumerate(self.requests):
            for place in range(self.width):
                end = len(output) - self.width + 1 + place
                before = list(prompt)[: len(prompt) + min(end, 0)], list(output)[: max(end, 0)]
                found[row, place] = by_prefix(logits[row, place], params, *before, stop_ids, words)
        return found
