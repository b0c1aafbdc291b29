"""Kernel of `moe_route` (Pallas, Mosaic GPU): one block per token."""

import functools
import operator

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxspec.pallas.gpu import access, device, layouts


@functools.partial(jax.jit, static_argnames=("rule", "interpret"))
def moe_route_kernel(scores, bias, live, rule, *, interpret=None):
    """Run `moe_route`; return the experts and the weights."""
    (tokens, columns), count = scores.shape[-2:], rule.num_experts
    layout = layouts.lane_layout(count)  # each warp has all, so that no warp waits for another
    operands = (scores, live.astype(jnp.int32), *([] if bias is None else [bias]))

    def body(scores, live, *rest, **scratch):
        *bias, experts, weights = rest
        token = lax.axis_index("token")
        is_live = live[token] > 0
        row = _summed(scores, token, **scratch) if scratch else scores.at[token]
        logits = access.load(row.at[:count], layout)
        score_of = _scores(logits, rule)
        score = score_of(logits)
        compared = score + access.load(bias[0], layout) if bias else score
        total = jnp.sum(compared)  # NaN if a score is NaN
        place = plgpu.broadcasted_iota(jnp.int32, (count,), 0, layout=layout)
        if rule.top_groups < rule.groups:
            is_among = _ranks_of_groups(compared, place, rule.groups) < rule.top_groups
            compared = jnp.where(is_among, compared, -jnp.inf)
        chosen, values = [], []
        for part in range(rule.num_chosen):
            best, index = _best(compared, place, part)
            # Recompute the chosen expert's score without its bias: selecting it by 22 sums over 512
            # experts would take more registers than there are.
            values.append(score_of(row[index]) if bias else best)
            compared = jnp.where(place == index, -jnp.inf, compared)
            chosen.append(index)
        scale = jnp.float32(rule.scale)
        if rule.renormalise:
            scale = scale / (sum(values) + rule.eps)
        scale = jnp.where(total == total, scale, jnp.nan)
        for part, (index, value) in enumerate(zip(chosen, values, strict=True)):
            experts[token, part] = jnp.where(is_live, index, rule.none)
            weights[token, part] = jnp.where(is_live, value * scale, 0.0)
        if rule.num_shared:
            gate = jnp.float32(1.0)
            if rule.gated_shared:
                gate = 1.0 / (1.0 + jnp.exp(-row[count]))
            for i in range(rule.num_shared):
                part = rule.num_chosen + i
                experts[token, part] = jnp.where(is_live, count + i, rule.none)
                weights[token, part] = jnp.where(is_live, gate, 0.0)

    shape = tokens, rule.parts
    kernel = plgpu.kernel(
        body,
        kernel_name="moe_route",
        out_type=(
            jax.ShapeDtypeStruct(shape, jnp.int32),
            jax.ShapeDtypeStruct(shape, jnp.float32),
        ),
        scratch_types={"total": plgpu.SMEM((columns,), jnp.float32)} if scores.ndim == 3 else {},
        grid=(tokens,),
        grid_names=("token",),
        compiler_params=plgpu.CompilerParams(),
        **({} if interpret is None else {"interpret": interpret}),
    )
    return kernel(*operands)


def _summed(scores, token, total):
    """Sum a token's partial scores into `total`, in the order of the parts."""
    parts, _, columns = scores.shape
    whole = columns - columns % device.THREADS
    pieces = layouts.row_pieces(whole, itemsize=4)
    if whole < columns:
        # Every warp has a copy of these: there are fewer columns than threads.
        rest = columns - whole
        pieces.append(layouts.RowPiece(whole, rest, layouts.lane_layout(rest)))
    # All loads are issued before the first use, so the block waits for the memory once.
    loaded = [
        [access.load(scores.at[i, token, piece.columns], piece.layout) for i in range(parts)]
        for piece in pieces
    ]
    for piece, rows in zip(pieces, loaded, strict=True):
        access.store(total.at[piece.columns], functools.reduce(operator.add, rows))
    plgpu.commit_smem()
    return total


def _scores(logits, rule):
    """Return a function that maps some of a token's logits to scores, given all `logits`."""
    if rule.score == "sigmoid":
        return lambda some: 1.0 / (1.0 + jnp.exp(-some))
    largest = jnp.max(logits)
    total = jnp.sum(jnp.exp(logits - largest))
    return lambda some: jnp.exp(some - largest) / total


def _ranks_of_groups(compared, place, groups):
    """Return for each expert how many groups are chosen before its own.

    Nothing precedes a group with NaN, so that enough experts remain to choose from.
    """
    size = compared.shape[0] // groups
    members = [(place >= first) & (place < first + size) for first in range(0, groups * size, size)]
    sums = []
    for is_member in members:
        own = jnp.where(is_member, compared, -jnp.inf)
        best, index = _best(own, place, 0)
        sums.append(best + jnp.max(jnp.where(place == index, -jnp.inf, own)))
    ranks = jnp.zeros_like(place)
    for group, (is_member, own) in enumerate(zip(members, sums, strict=True)):
        before = [other >= own for other in sums[:group]] + [
            other > own for other in sums[group + 1 :]
        ]
        ranks = jnp.where(is_member, sum(each.astype(jnp.int32) for each in before), ranks)
    return ranks


def _best(compared, place, part):
    """Return the largest entry and its position, the lowest on ties.

    If an entry is NaN, so is the largest. The position is then `part` places before the last, so
    that no two parts get the same expert.
    """
    count = compared.shape[0]
    best = jnp.max(compared)
    index = jnp.min(jnp.where(compared == best, place, count))
    return best, jnp.where(index == count, count - 1 - part, index)
