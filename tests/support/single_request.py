"""One request driven through a model by hand: what the engine does, without the engine."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxspec.cache import CacheOptions, PoolSizes, Snapshot, allocate
from jaxspec.models.base import ModelInputs, Selection
from jaxspec.pallas.paging.slot_mapping import slot_mapping
from jaxspec.regions import DecodeRegion, PrefillRegion

BUCKET = 96  # tokens of the prefill region
ROWS, WIDTH = 2, 4  # of the decode rectangle
SIZES = PoolSizes(num_pages=16, page_size=8, num_slots=3, width=WIDTH)
FLOAT32 = jnp.dtype("float32")
GARBAGE = 10**6  # what padding's indices hold


@functools.partial(jax.jit, static_argnums=0)
def _trunk(graph, params, inputs, pools):
    model = nnx.merge(graph, params)
    output, pools = model.forward(inputs, pools)
    return output.hidden, model.logits(output.hidden), pools


@functools.partial(jax.jit, static_argnums=0)
def _head(graph, params, next_tokens, hidden, inputs, pools, selection):
    model = nnx.merge(graph, params)
    operands = model.embed(next_tokens), hidden, inputs, pools
    if selection is None:
        hidden, pools = model.draft_head(*operands)
    else:
        hidden, pools = model.draft_head.select(*operands, selection)
    return hidden, model.logits(hidden), pools


_slot_mapping = jax.jit(slot_mapping, static_argnames="page_size")


def _int32(*values):
    return jnp.asarray(values, jnp.int32)


class SingleRequest:
    """A request in slot 2, row 1 of the rectangle; row 0 and the rest of a chunk are padding."""

    def __init__(self, model, dtype=FLOAT32):
        """`dtype`: of what is cached, but for recurrent states."""
        self.graph, self.params = nnx.split(model)
        options = CacheOptions(dtype, dtype, FLOAT32, Snapshot())
        self.pools = allocate(model.cache_specs(options), SIZES)
        self.pages = np.zeros((SIZES.num_slots, 14), np.int32)
        self.pages[2] = np.random.default_rng(0).permutation(np.arange(1, 15))
        self.width, self.num_computed, self.state_offset = WIDTH, 0, 0

    def _inputs(self, tokens, count, *, prefill):
        """The step's inputs and where in its flat tokens the request's stand."""
        rectangle = ROWS * self.width
        begin = rectangle if prefill else self.width
        place = begin + np.arange(count)
        flat = np.full(rectangle + BUCKET * prefill, GARBAGE, np.int32)
        positions = flat.copy()
        flat[place] = tokens
        positions[place] = self.num_computed + np.arange(count)
        live = np.isin(np.arange(len(flat)), place)
        owners = jnp.asarray(np.where(live, 2, GARBAGE), jnp.int32)
        row = 0 if prefill else 2
        inputs = ModelInputs(
            tokens=jnp.asarray(flat),
            positions=jnp.asarray(positions),
            kv_slots=_slot_mapping(
                jnp.asarray(self.pages),
                owners,
                jnp.asarray(positions),
                jnp.asarray(live),
                page_size=SIZES.page_size,
            ),
            live=jnp.asarray(live),
            page_tables=jnp.asarray(self.pages),
            decode=DecodeRegion(
                slots=_int32(0, row),
                num_computed=_int32(GARBAGE, self.num_computed),
                query_len=_int32(GARBAGE, 0 if prefill else count),
                state_offset=_int32(GARBAGE, self.state_offset),
                ring_length=_int32(GARBAGE, 0),
            ),
            prefill=PrefillRegion(
                slots=_int32(2, 0),
                num_computed=_int32(self.num_computed, GARBAGE),
                query_start=_int32(0, count, count),
                state_offset=_int32(self.state_offset, GARBAGE),
            )
            if prefill
            else None,
            width=self.width,
        )
        return inputs, place

    def step(self, tokens, *, prefill, accepted=None):
        """Hidden states and logits of `tokens`; all of them, or `accepted` drafts, then count."""
        count = len(tokens)
        inputs, place = self._inputs(tokens, count, prefill=prefill)
        hidden, logits, self.pools = _trunk(self.graph, self.params, inputs, self.pools)
        kept = count if accepted is None else 1 + accepted
        self.num_computed += kept
        self.state_offset = 0 if prefill else kept - 1
        return np.asarray(hidden)[place], np.asarray(logits)[place]

    def prefill(self, tokens, chunk=BUCKET):
        """Hidden states and logits of a prompt, computed in chunks of `chunk`."""
        parts = [
            self.step(tokens[at : at + chunk], prefill=True) for at in range(0, len(tokens), chunk)
        ]
        return tuple(np.concatenate(part) for part in zip(*parts, strict=True))

    def decode(self, prompt, greedy, count):
        """Scores of each token of `greedy`: after the prompt, then `count` tokens at a time."""
        logits = [self.prefill(prompt)[1][-1:]]
        for at in range(0, len(greedy) - 1, count):
            logits.append(self.step(greedy[at : at + count], prefill=False)[1])
        return np.concatenate(logits)[: len(greedy)]

    def verify(self, prompt, greedy):
        """Scores of `greedy` from its second token on, by rows of which some drafts are wrong."""
        rng, vocab_size = np.random.default_rng(0), nnx.merge(self.graph, self.params).vocab_size
        self.prefill(prompt)
        logits, at = [], 0
        while at < len(greedy) - WIDTH:
            accepted = int(rng.integers(0, WIDTH))
            tokens = greedy[at : at + WIDTH].copy()
            tokens[1 + accepted :] = (tokens[1 + accepted :] + 7) % vocab_size
            logits.append(self.step(tokens, prefill=False, accepted=accepted)[1][: 1 + accepted])
            at += 1 + accepted
        return np.concatenate(logits)

    def draft(self, next_tokens, hidden, position, *, prefill, only_last=False):
        """The draft head's hidden states and logits for tokens from `position` on, or the last."""
        count, selection = len(next_tokens), None
        self.num_computed = position
        inputs, place = self._inputs(0, count, prefill=prefill)
        tokens = np.zeros(len(inputs.tokens), np.int32)
        states = np.zeros((len(tokens), hidden.shape[1]), hidden.dtype)
        tokens[place], states[place] = next_tokens, hidden
        if only_last:
            width, self.width, self.num_computed = self.width, 1, position + count - 1
            index = _int32(0, place[-1])  # of row 0 anything, it is padding
            row, place = self._inputs(0, 1, prefill=False)
            selection, self.width = Selection(index, row), width
        operands = jnp.asarray(tokens), jnp.asarray(states), inputs, self.pools, selection
        out, logits, self.pools = _head(self.graph, self.params, *operands)
        return np.asarray(out)[place], np.asarray(logits)[place]
