"""`gdn_replay` on a Hopper GPU.

A block has one head of one row, or where there are few, some of its values. With `S_0` the
checkpoint, `k_j, u_j` the ring's tokens and `x` one of this step's queries and keys, the state
before this step gives

    S x = exp(G_P) S_0 x + sum_j (k_j . x) exp(G_P - G_j) u_j

so a checkpoint is read once, for all `x` together. A row that folds does that first, and then has
no ring. All there is to read is on its way to shared memory at once, then come the products, and
what is left for one value, by one thread, needs nothing of the others.

What lies in shared memory, in the order of its use:

    state            the checkpoint's values, in float32 a quarter of the keys after the other;
                     copies write it (`state_came`), a fold stores it back
    tokens           queries, then keys (`tokens_came`, or the block makes them)
    keys             this step's as the ring has them, then the ring's (`ring_came`), by age
    updates          the ring's (`ring_came`), by age
    gates, since     the ring's gates, behind them this step's if the block makes them; the decay
                     since each of the ring's tokens, 0 for none
    overlap          keys times queries and keys, a row a key as in `keys`
    read             values, if the block makes them; of a norm what each token reads of the state
    factors          in 16 bits: the keys of a fold, then queries and keys for tensor cores, and
                     what rounding takes from them
    products         the state's: in float32 each warp's own, where `keys` were; in 16 bits where
                     `tokens` were

`met` lies between what threads write and what others read; where tensor cores or a copy read,
`commit_smem`.
"""

import dataclasses
import functools
import types

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxspec.pallas.gated_delta.conv_replay_block import ConvBlock
from jaxspec.pallas.gated_delta.replay_block import Block
from jaxspec.pallas.gpu import device, tensor_cores
from jaxspec.pallas.recurrent.replay import asked_rows
from jaxspec.pallas.recurrent.replay_block import COMPILER_PARAMS, TOGETHER, ReplaySizes, in_place


@functools.partial(jax.jit, static_argnames=("interpret", "splits"))
def gdn_replay_kernel(
    q, k, v, g, beta, states, ring, layer, slots, num_computed, ring_length, query_len, norm=None,
    *, interpret=None, splits=None,
):  # fmt: skip
    """`gdn_replay` with `layer` on the device.

    `interpret`: parameters of Mosaic's interpreter. `splits`: blocks of a head.
    """
    tokens, shape = {"q": q, "k": k, "v": v, "g": g, "beta": beta}, q.shape[:3]
    index, how = (slots, num_computed, ring_length, query_len), (norm, splits, interpret)
    pools = states, ring, None
    return _launch("gdn_replay", Block, tokens, shape, pools, layer, index, *how)[:3]


@functools.partial(jax.jit, static_argnames=("heads", "interpret", "splits"))
def gdn_conv_replay_kernel(
    x, taps, decay, conv, states, ring, layer, slots, num_computed, ring_length, query_len, heads,
    norm=None, *, interpret=None, splits=None,
):  # fmt: skip
    """`gdn_conv_replay` with `layer` on the device, and `taps` `[kernel, channels]`."""
    tokens, shape = {"x": x, "taps": taps, "decay": decay}, (*x.shape[:2], heads.key_heads)
    index, how = (slots, num_computed, ring_length, query_len), (norm, splits, interpret)
    # As checkpoints and the state's ring are: by layer, slot and row, and one more axis.
    pools = states, ring, conv[..., None, :]
    launched = _launch("gdn_conv_replay", ConvBlock, tokens, shape, pools, layer, index, *how)
    out, *after, pool = launched
    return out, pool.reshape(conv.shape), *after


def _launch(name, block, tokens, shape, pools, layer, index, norm, splits, interpret):
    """What a kernel of these blocks puts out, and the pools: checkpoints, ring, and of inputs.

    `tokens`: operands by name. `shape`: rows, tokens of each, key heads.
    """
    (states, ring, conv), (rows, width, key_heads) = pools, shape
    in_ring = ring.k.shape[2]
    _, slots_in_pool, _, heads, value_dim, key_dim = states.shape
    splits = splits or _splits(rows * heads, value_dim, states.dtype)
    norm = norm if norm is not None and splits == 1 and _can_norm(norm) else None
    conv_rows = 1 if conv is None else conv.shape[2]
    sizes = _Sizes(
        values=value_dim // splits,
        key_dim=key_dim,
        width=width,
        rows=in_ring,
        heads=heads,
        key_heads=key_heads,
        slots=slots_in_pool,
        dtype=states.dtype,
        splits=splits,
        conv_rows=conv_rows,
        norm=norm and (norm.first, norm.eps),
    )
    at_once = rows * heads * splits <= 2 * device.MULTIPROCESSORS
    slots, computed, length, query_len = index
    asked = asked_rows(
        slots, computed, length, query_len, slots_in_pool, width, in_ring,
        at_once=at_once, conv_rows=conv_rows,
    )  # fmt: skip
    of_norm = {} if norm is None else {"norm_gates": norm.gates, "norm_weight": norm.weight}
    operands = {**of_norm, **tokens, "layer": layer[None], "rows": asked}
    names = *operands, *_POOLS[: 4 if conv is None else 5], "out"

    def body(*refs, **scratch):
        refs = dict(zip(names, refs, strict=True))
        block(sizes, types.SimpleNamespace(**{"spare": None, **refs, **scratch})).run()

    dtype = norm.gates.dtype if norm else jnp.float32
    kernel = plgpu.kernel(
        body,
        kernel_name=name,
        out_type=jax.ShapeDtypeStruct((rows, width, heads, value_dim), dtype),
        scratch_types=_scratch(sizes, interpret is not None),
        grid=(rows, heads, splits),
        grid_names=("row", "head", "split"),
        compiler_params=COMPILER_PARAMS,
        **({} if interpret is None else {"interpret": interpret}),
    )
    out, *after = in_place(kernel, operands.values(), *pools)
    return out if norm is None else out.reshape(*out.shape[:2], -1), *after


_POOLS = "states", "ring_k", "ring_u", "ring_g", "conv"
_NORMED = jnp.float32, jnp.bfloat16, jnp.float16


def _splits(heads, value_dim, dtype):
    """How many blocks share a head, given the heads of all rows.

    With a block on each multiprocessor, more do not help.
    """
    fewest_values = 64 if dtype.itemsize == 2 else 32  # of tensor cores, of a layout
    splits = 1
    while 2 * splits * heads <= device.MULTIPROCESSORS and value_dim // splits > fewest_values:
        splits *= 2
    return splits


def _can_norm(norm):
    """Whether the kernel takes these: a thread loads neighbouring gates at once."""
    is_aligned = norm.first % 4 == norm.gates.shape[1] % 4 == 0
    return is_aligned and norm.weight.dtype == jnp.float32 and norm.gates.dtype in _NORMED


def _scratch(sizes, interpreted):
    """A block's shared memory and barriers."""
    scratch = {
        "updates": plgpu.SMEM((sizes.window, sizes.values), sizes.dtype),
        "gates": plgpu.SMEM((sizes.square + 2 * sizes.width,), jnp.float32),
        "since": plgpu.SMEM((sizes.square,), jnp.float32),
        "overlap": plgpu.SMEM((sizes.keys, sizes.columns), jnp.float32),
        "met": plgpu.Barrier(),
        "state_came": plgpu.Barrier(num_arrivals=1 if sizes.on_tensor_cores else 4),
        "ring_came": plgpu.Barrier(
            num_arrivals=2 * TOGETHER, num_barriers=sizes.window // TOGETHER
        ),
    }
    if not sizes.makes_tokens:
        scratch["tokens_came"] = plgpu.Barrier(num_arrivals=2 if sizes.on_tensor_cores else 3)
    if sizes.norm or sizes.makes_tokens:
        scratch["read"] = plgpu.SMEM((sizes.width, sizes.values), jnp.float32)
    tokens = plgpu.SMEM((sizes.tokens, sizes.key_dim), jnp.float32)
    keys = plgpu.SMEM((sizes.keys, sizes.key_dim), sizes.dtype)
    if sizes.on_tensor_cores:
        scratch["state"] = tensor_cores.tile(sizes.values, sizes.key_dim, dtype=sizes.dtype)
        scratch["keys"] = keys
        factors = tensor_cores.tile(2 * sizes.columns, sizes.key_dim, dtype=sizes.dtype)
        # 16 tokens' keys are all that a product adds; it takes them in stripes as wide.
        stripes = plgpu.TilingTransform((8, 16)), plgpu.SwizzleTransform(32)
        fold_keys = plgpu.SMEM((16, sizes.key_dim), sizes.dtype, transforms=stripes)
        products = plgpu.SMEM((sizes.values, sizes.columns), jnp.float32)
        # Tokens have been read when products come; a fold is over before there are factors.
        scratch["tokens"] = plgpu.RefUnion(tokens, products)
        scratch["factors"] = plgpu.RefUnion(factors, fold_keys)
        if interpreted:
            scratch["spare"] = plgpu.SMEM((64, 16), sizes.dtype)
    else:
        quarter = sizes.key_dim // 4
        transforms = plgpu.TilingTransform((8, quarter)), plgpu.SwizzleTransform(4 * quarter)
        state = (4, sizes.values, quarter)
        scratch["state"] = plgpu.SMEM(state, jnp.float32, transforms=transforms)
        products = plgpu.SMEM((sizes.at_once, 4, sizes.values), jnp.float32)
        scratch["tokens"], scratch["keys"] = tokens, plgpu.RefUnion(keys, products)
        if interpreted:
            scratch["spare"] = plgpu.SMEM((4, quarter), jnp.float32)
    return scratch


@dataclasses.dataclass(frozen=True)
class _Sizes(ReplaySizes):
    """Its factors are queries and keys."""

    splits: int  # blocks of a head
    conv_rows: int  # of the convolution's ring; 1: there is none, and 0 its only remainder
    norm: tuple[int, float] | None  # the first column of the gates, and what is added

    @property
    def makes_tokens(self) -> bool:
        """Whether the block does, of a projection."""
        return self.conv_rows > 1

    @property
    def on_tensor_cores(self) -> bool:
        return self.dtype.itemsize == 2

    @property
    def factors(self) -> int:
        return 2 * self.width

    @property
    def columns(self) -> int:
        """Of products: tensor cores make eight at least."""
        return max(8, super().columns) if self.on_tensor_cores else super().columns

    @property
    def tokens(self) -> int:
        """Rows of queries and of keys: full groups of 4, for tensor cores a row a column."""
        return self.columns if self.on_tensor_cores else -(-self.factors // 4) * 4

    @property
    def at_once(self) -> int:
        """Factors whose products with quarters of the keys take no more room than all keys."""
        return min(self.factors, self.keys * self.key_dim // (8 * self.values) * 2)
