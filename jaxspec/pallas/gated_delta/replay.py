"""One verify step of Gated DeltaNet that keeps no state a token, but what replays it."""

import flax.struct
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec.pallas import dispatch
from jaxspec.pallas.norm.gated_norm import GatedNorm
from jaxspec.pallas.recurrent.replay import as_kept, check_ring, must_fold, sums_after
from jaxspec.pallas.recurrent.state_select import state_select_reference

States = Float[Array, "layers slots 1 value_heads value_dim key_dim"]
Outputs = Float[Array, "rows width value_heads value_dim"] | Float[Array, "rows width features"]


@flax.struct.dataclass
class GdnRing:
    """What each token added to its slot's state: `u k^T` after a decay of `g`.

    `recurrent.replay` says which row is whose. `k` and `u` have the checkpoint's dtype.
    """

    k: Float[Array, "layers slots ring key_heads key_dim"]
    u: Float[Array, "layers slots ring value_heads value_dim"]
    g: Float[Array, "layers slots ring value_heads"]  # float32, log decay
    window: int = flax.struct.field(pytree_node=False, default=0)


def gdn_replay(
    q: Float[Array, "rows width key_heads key_dim"],
    k: Float[Array, "rows width key_heads key_dim"],
    v: Float[Array, "rows width value_heads value_dim"],
    g: Float[Array, "rows width value_heads"],
    beta: Float[Array, "rows width value_heads"],
    states: States,
    ring: GdnRing,
    layer: int,
    slots: Int[Array, " rows"],
    num_computed: Int[Array, " rows"],
    ring_length: Int[Array, " rows"],
    query_len: Int[Array, " rows"],
    norm: GatedNorm | None = None,
) -> tuple[Outputs, States, GdnRing]:
    """The gated delta rule over each row's tokens: outputs, the new pool, the new ring.

    The rule and its operands are `gdn_step`'s, but for what is kept. A slot's state is its
    checkpoint and the ring's tokens at `num_computed - ring_length .. num_computed - 1`; with the
    running sum `G` of their `g`:

        S = exp(G_P) S_0 + sum_j exp(G_P - G_j) u_j k_j^T

    A row that `must_fold` writes this as its checkpoint, and goes on from what it wrote. Its tokens
    `t < query_len` go to the ring at `num_computed + t`; the caller counts those that stand, by
    `next_ring_length`. `k` and `u` are rounded to the ring's dtype before anything uses them, so
    that what is replayed later is what this step computed with. Outputs are float32. Padding rows
    and tokens write nothing, and what they put out means nothing.

    A `norm` of all tokens, row by row, may be in the kernel: where there are heads enough that each
    is one block's. The outputs then are what it makes of them, `[rows, width, features]` in the
    dtype of its gates.

    Raises:
        ValueError: less than 2 rows of the ring a token, or `norm` is not for these tokens and
            heads (`GatedNorm.check`).
    """
    check(q.shape[:2], states, ring, norm)
    tokens, index = (q, k, v, g, beta), (slots, num_computed, ring_length, query_len)
    if dispatch.runs_kernel("gdn_replay", unsupported(q.shape[1], states, ring)):
        # Here, because it takes 0.2 s and not every build of jaxlib for a CPU can import it.
        from jaxspec.pallas.gated_delta.replay_kernel import gdn_replay_kernel

        on_device = dispatch.layer_index(states, layer)
        return gdn_replay_kernel(*tokens, states, ring, on_device, *index, norm)
    return gdn_replay_reference(*tokens, states, ring, layer, *index)


def check(tokens, states, ring, norm):
    """Raise the ValueError of `gdn_replay`; `tokens`: rows, and tokens of each."""
    rows, width = tokens
    check_ring(width, ring.k.shape[2])
    if norm is not None:
        norm.check(rows * width, states.shape[3] * states.shape[4])


def gdn_replay_reference(
    q, k, v, g, beta, states, ring, layer, slots, num_computed, ring_length, query_len
):
    """The specification of `gdn_replay`: fold for itself, then one token after the other."""
    width, group = q.shape[1], states.shape[3] // q.shape[2]
    num_slots, rows_in_ring = states.shape[1], ring.k.shape[2]
    real = (slots > 0) & (slots < num_slots) & (query_len > 0)
    token = jnp.arange(width, dtype=jnp.int32)[None, :]
    place = (num_computed[:, None] + token) % rows_in_ring
    target = jnp.where(real[:, None] & (token < query_len[:, None]), slots[:, None], num_slots)

    def append(pool, new):
        return pool.at[layer, target, place].set(new.astype(pool.dtype), mode="drop")

    # Before the ring is read, where these rows do not count: XLA need not copy it then.
    ring = ring.replace(k=append(ring.k, k), g=append(ring.g, g))
    slot = jnp.clip(slots, 0, num_slots - 1)
    start = _replayed(states, ring, layer, slot, num_computed, ring_length, width)

    folds = real & must_fold(ring_length, width, rows_in_ring)
    state = jnp.where(folds[:, None, None, None], as_kept(start, states.dtype), start)
    outputs, written = [], []
    for t in range(width):
        k_t = as_kept(k[:, t], ring.k.dtype)
        q_h, k_h = (jnp.repeat(x, group, axis=1) for x in (q[:, t], k_t))
        state = state * jnp.exp(g[:, t])[..., None, None]
        recalled = jnp.einsum("rhvk,rhk->rhv", state, k_h, precision="highest")
        u_t = beta[:, t][..., None] * (v[:, t] - recalled)
        u_t = as_kept(u_t, ring.u.dtype)
        state = state + u_t[..., None] * k_h[..., None, :]
        outputs.append(jnp.einsum("rhvk,rhk->rhv", state, q_h, precision="highest"))
        written.append(u_t)

    target_slot = jnp.where(folds, slots, num_slots)
    states = states.at[layer, target_slot, 0].set(start.astype(states.dtype), mode="drop")
    ring = ring.replace(u=append(ring.u, jnp.stack(written, axis=1)))
    return jnp.stack(outputs, axis=1), states, ring


def _replayed(
    states: States,
    ring: GdnRing,
    layer: int,
    slot: Int[Array, " rows"],
    num_computed: Int[Array, " rows"],
    ring_length: Int[Array, " rows"],
    width: int,
) -> Float[Array, "rows value_heads value_dim key_dim"]:
    """Each row's state: its checkpoint, and the ring's tokens added, in float32."""
    group, rows_in_ring = states.shape[3] // ring.k.shape[3], ring.k.shape[2]
    # By age, the newest last; what lies beyond `ring_length` may hold anything.
    age = jnp.arange(rows_in_ring, 0, -1, dtype=jnp.int32)[None, :]
    place = (num_computed[:, None] - age) % rows_in_ring
    # More would be rows that this step writes.
    counts = age <= jnp.minimum(ring_length, rows_in_ring - width)[:, None]

    # A row more, for the reason that `state_select_reference` gives.
    slot_and_null, place = jnp.pad(slot, (0, 1))[:, None], jnp.pad(place, ((0, 1), (0, 0)))

    def take(pool):
        taken = pool[layer, slot_and_null, place][:-1].astype(jnp.float32)
        return jnp.where(counts.reshape(*counts.shape, *(1,) * (taken.ndim - 2)), taken, 0.0)

    k, u, g = jnp.repeat(take(ring.k), group, axis=2), take(ring.u), take(ring.g)
    after = sums_after(g)
    whole = jnp.exp(jnp.sum(g, axis=1))[..., None, None]
    checkpoint = state_select_reference(states, layer, slot, jnp.zeros_like(slot))
    checkpoint = checkpoint.astype(jnp.float32)
    added = jnp.einsum("rwh,rwhv,rwhk->rhvk", jnp.exp(after), u, k, precision="highest")
    return whole * checkpoint + added


def unsupported(width, states, ring):
    """Why `gdn_replay_kernel` does not take these operands, or None."""
    value_dim, key_dim = states.shape[4:]
    if width > 8:
        return f"{width} tokens a row, more than 8"
    if ring.k.shape[2] - width > 64:
        return f"a ring that holds {ring.k.shape[2] - width} tokens, more than 64"
    if states.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        return f"states in {states.dtype}"
    if not states.dtype == ring.k.dtype == ring.u.dtype:
        return f"a ring in {ring.k.dtype} for states in {states.dtype}"
    if value_dim not in (64, 128) or key_dim not in (64, 128):
        return f"heads of {value_dim} x {key_dim}, not 64 or 128"
    return None
