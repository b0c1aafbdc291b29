"""The forward pass of deterministic engines: the step's tokens in tiles of a fixed size.

Every token passes through the same program, whether it is a prompt's, a draft or a newest one, and
whatever is computed beside it. Live tokens come first, in the order of the step; a tile runs all
layers before the next one starts. So its tokens read keys, values and states of earlier ones.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from jaxspec import device
from jaxspec.cache import Pools
from jaxspec.models.base import ForwardOutput, Model, ModelInputs
from jaxspec.pallas.attention.references import whole_context
from jaxspec.pallas.row_tiles import carry_over_tiles
from jaxspec.regions import NO_SLOT, DecodeRegion, TokenRegion, owner_of

# Tokens per tile, by platform. On a CPU, LLVM may compile the rows at the end of a tile otherwise
# than the first ones, so each token has its own. A GPU reads all weights for each tile, which takes
# about as long as multiplying them with 256 tokens.
_TOKENS = {"cpu": 1}
_OTHER_TOKENS = 256


def forward_in_tiles(
    model: Model, inputs: ModelInputs, pools: Pools, taps: tuple[int, ...], *, page_size: int
) -> tuple[ForwardOutput, Pools]:
    """Return what `Model.forward` does, with the same bits for a token in any step.

    The output of padding is 0. The model's recurrent states must be snapshots.
    """
    # Page tables have a width from max_model_len, and on a CPU no bit depends on it.
    columns = whole_context(inputs.page_tables.shape[1], page_size)
    missing = columns - inputs.page_tables.shape[1]
    page_tables = jnp.pad(inputs.page_tables, ((0, 0), (0, missing)))
    order = jnp.argsort(~inputs.live, stable=True)
    tokens = jax.tree.map(
        lambda x: x[order],
        (inputs.tokens, inputs.positions, inputs.kv_slots, inputs.live, *_rows(inputs)),
    )
    count = jnp.sum(inputs.live, dtype=jnp.int32)

    def forward(tile, pools):
        tokens, positions, kv_slots, live, rows, candidate = tile
        step = ModelInputs(
            tokens=tokens,
            positions=positions,
            kv_slots=jnp.where(live, kv_slots, NO_SLOT),
            live=live,
            page_tables=page_tables,
            decode=TokenRegion.of(rows, candidate),
            prefill=None,
            width=1,
        )
        return model.forward(step, pools, taps)

    size = _TOKENS.get(device.default_device().platform, _OTHER_TOKENS)
    output, pools = carry_over_tiles(forward, tokens, pools, size=size, live=count)
    restored = functools.partial(_restored, order=order)
    return jax.tree.map(restored, output), pools


def _rows(inputs: ModelInputs) -> tuple[DecodeRegion, Int[Array, " tokens"]]:
    """Return each token as a row of width 1, and the candidate that its state becomes.

    A row starts at the state of the token before it.
    """
    rows, width = inputs.decode, inputs.width
    place = jnp.arange(width, dtype=jnp.int32)[None, :]
    shape = rows.slots.shape[0], width
    start = jnp.where(place > 0, place - 1, rows.state_offset[:, None])
    slots, starts, candidates = (
        jnp.broadcast_to(x, shape).reshape(-1) for x in (rows.slots[:, None], start, place)
    )
    if (chunks := inputs.prefill) is not None:
        token = jnp.arange(len(inputs.tokens) - len(slots), dtype=jnp.int32)
        seq = owner_of(token, chunks.query_start[1:])
        is_first = token == chunks.query_start[seq]
        slots = jnp.concatenate([slots, chunks.slots[seq]])
        starts = jnp.concatenate([starts, jnp.where(is_first, chunks.state_offset[seq], 0)])
        candidates = jnp.concatenate([candidates, jnp.zeros_like(token)])
    rows = DecodeRegion(
        slots=jnp.where(inputs.live, slots, 0),
        num_computed=inputs.positions,
        query_len=inputs.live.astype(jnp.int32),
        state_offset=starts,
        ring_length=jnp.zeros_like(slots),
    )
    return rows, candidates


def _restored(x: Array, order: Int[Array, " tokens"]) -> Array:
    return jnp.zeros_like(x).at[order].set(x, unique_indices=True)
