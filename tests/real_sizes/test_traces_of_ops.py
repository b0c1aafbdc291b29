"""Every op and every reference traces with no row, one row and several rows, at published sizes.

Nothing is computed (`jax.eval_shape`). With no rows the reference runs on a GPU too: no kernel may
be chosen, for its grid would be empty.
"""

import dataclasses
import enum
import importlib
import inspect
import pkgutil

import jax
import jax.numpy as jnp
import pytest

import jaxspec.pallas
from benchmarks.measure.shapes import ATTENTION, GDN, KDA, MAMBA2
from jaxspec.pallas import dispatch
from jaxspec.pallas.attention.inputs import QKNorm
from jaxspec.pallas.attention.output_gate import OutputGate
from jaxspec.pallas.attention.ring_tables import ring_length
from jaxspec.pallas.attention.token_index import TokenIndex
from jaxspec.pallas.gated_delta.heads import (
    ChannelParams,
    GdnHeads,
    GdnParams,
    GdnRing,
    GdnTokens,
)
from jaxspec.pallas.mamba2.heads import Mamba2Heads, Mamba2Params, Mamba2Ring, Mamba2Tokens
from jaxspec.pallas.matmul.activation import Activation
from jaxspec.pallas.moe.experts import Experts
from jaxspec.pallas.moe.feed_forward import Router
from jaxspec.pallas.moe.route import Choices, Routing
from jaxspec.pallas.norm.gated_group_norm import GatedGroupNorm
from jaxspec.pallas.norm.gated_norm import GatedNorm
from jaxspec.pallas.norm.rms_norm import Norm
from jaxspec.pallas.selection import LastKept
from jaxspec.pallas.selection.noise import RowKeys
from jaxspec.regions import DecodeRegion, PrefillRegion, TokenRegion
from jaxspec.weight import Dense, DenseExperts

ROWS = 0, 1, 64
WIDTH, SLOTS, PAGES, PAGE_SIZE, SEQS = 4, 65, 129, 16, 2
HIDDEN, INNER = 2048, 6144
BFLOAT16 = jnp.bfloat16
HEADS, DELTA, MAMBA = ATTENTION["qwen3.5-9b"], GDN["qwen3.5-9b"], MAMBA2["nemotron-3-nano"]
WINDOW, RING = 32, 32 + WIDTH
LATENT, ROPE = 512, 64  # features of a token's latent and of its rotated key, as in DeepSeek-V3
SLIDING = 128  # tokens that gpt-oss attends to


def array(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def half(*shape):
    return array(*shape, dtype=BFLOAT16)


def ints(*shape):
    return array(*shape, dtype=jnp.int32)


def region(rows):
    return DecodeRegion(*[ints(rows)] * 5)


def tokens_of(rows):
    return TokenRegion(*[ints(rows)] * len(dataclasses.fields(TokenRegion)))


def chunks(tokens):
    """No chunk without tokens, as `StepShapes.prefill_seqs` has it."""
    seqs = min(SEQS, tokens)
    return PrefillRegion(ints(seqs), ints(seqs), ints(seqs + 1), ints(seqs))


def weight(inner, outer):
    return Dense(half(inner, outer))


NORM = Norm(half(HIDDEN), 1e-6)
KV = half(2, 2, PAGES, PAGE_SIZE, HEADS.kv_heads, HEADS.head_dim)
LATENTS = half(2, PAGES, PAGE_SIZE, LATENT + ROPE)
INDEX_KEYS = half(2, PAGES, PAGE_SIZE, 128)
KV_RINGS = half(2, SLOTS, ring_length(SLIDING, WIDTH), 2, HEADS.kv_heads, HEADS.head_dim)
TABLES = ints(SLOTS, 8)
GATED_COLUMNS = 2 * (HEADS.heads + HEADS.kv_heads) * HEADS.head_dim
ANGLES = HEADS.head_dim // 8

# Gated DeltaNet.
DELTA_HEADS = GdnHeads(DELTA.key_heads, DELTA.key_dim, DELTA.value_heads)
DELTA_PARAMS = GdnParams(half(4, DELTA.conv_dim), array(DELTA.value_heads, 2), DELTA_HEADS)
DELTA_CONV = half(2, SLOTS, 3 + WIDTH, DELTA.conv_dim)
DELTA_RING = GdnRing(
    array(2, SLOTS, RING, DELTA.key_heads, DELTA.key_dim),
    array(2, SLOTS, RING, DELTA.value_heads, DELTA.value_dim),
    array(2, SLOTS, RING, DELTA.value_heads),
    WINDOW,
)


# Kimi Delta Attention.
KIMI = KDA["kimi-linear-48b-a3b"]
KIMI_PARAMS = ChannelParams(
    conv=half(4, KIMI.conv_dim),
    log_rate=array(KIMI.value_heads),
    bias=array(KIMI.value_heads, KIMI.key_dim),
    lower_bound=None,
    heads=GdnHeads(KIMI.key_heads, KIMI.key_dim, KIMI.value_heads),
    f_column=0,
    b_column=KIMI.conv_dim,
)


def delta_states(candidates):
    return array(2, SLOTS, candidates, DELTA.value_heads, DELTA.value_dim, DELTA.key_dim)


def delta_tokens(*tokens):
    keys = array(*tokens, DELTA.key_heads, DELTA.key_dim)
    gates = array(*tokens, DELTA.value_heads)
    values = array(*tokens, DELTA.value_heads, DELTA.value_dim)
    return GdnTokens(keys, keys, values, gates, gates)


# Mamba2.
MAMBA_HEADS = Mamba2Heads(MAMBA.heads, MAMBA.head_dim, MAMBA.groups, MAMBA.state_dim)
MAMBA_PARAMS = Mamba2Params(
    half(4, MAMBA.conv_dim), half(MAMBA.conv_dim), array(MAMBA.heads, 3), MAMBA_HEADS
)
MAMBA_CONV = half(2, SLOTS, 3 + WIDTH, MAMBA.conv_dim)
MAMBA_RING = Mamba2Ring(
    array(2, SLOTS, RING, MAMBA.heads, MAMBA.head_dim),
    array(2, SLOTS, RING, MAMBA.groups, MAMBA.state_dim),
    array(2, SLOTS, RING, MAMBA.heads),
    WINDOW,
)


def mamba_states(candidates):
    return array(2, SLOTS, candidates, MAMBA.heads, MAMBA.head_dim, MAMBA.state_dim)


def mamba_tokens(*tokens):
    keys, of_head = array(*tokens, MAMBA.groups, MAMBA.state_dim), array(MAMBA.heads)
    x = array(*tokens, MAMBA.heads, MAMBA.head_dim)
    return Mamba2Tokens(x, array(*tokens, MAMBA.heads), of_head, keys, keys, of_head)


# Experts: the groups are those of Nemotron-3, which has more than one.
ROUTING = Routing(num_experts=128, num_chosen=6, groups=8, top_groups=4)
EXPERTS = Experts(DenseExperts(half(128, 2 * 512, HIDDEN)), DenseExperts(half(128, HIDDEN, 512)))
LATENT_EXPERTS = Experts(
    DenseExperts(half(128, 512, 1024)), DenseExperts(half(128, 1024, 512)), Activation.SQUARED_RELU
)


def group_norm(rows):
    gates = half(rows, MAMBA.projected)
    features = MAMBA.heads * MAMBA.head_dim
    return GatedGroupNorm(gates, array(features), MAMBA.conv_dim, MAMBA.groups, 1e-5)


def gated_norm(rows):
    return GatedNorm(half(rows, DELTA.projected), array(DELTA.value_dim), DELTA.conv_dim, 1e-6)


# The operands of each op, and of its reference, for so many rows (or tokens of prompts).
OPS = {
    "add_norm": lambda n: (half(n, HIDDEN), half(n, HIDDEN), NORM),
    "rms_norm": lambda n: (half(n, HIDDEN), half(HIDDEN), 1e-6),
    "Norm": lambda n: (NORM, half(n, HIDDEN)),
    "GatedNorm": lambda n: (gated_norm(n), array(n, DELTA.value_heads, DELTA.value_dim)),
    "GatedGroupNorm": lambda n: (group_norm(n), array(n, MAMBA.heads, MAMBA.head_dim)),
    "gated_group_norm": lambda n: (group_norm(n), array(n, MAMBA.heads * MAMBA.head_dim)),
    "OutputGate": lambda n: (
        OutputGate(half(n, GATED_COLUMNS)),
        half(n, HEADS.heads, HEADS.head_dim),
    ),
    # Products with a weight.
    "norm_matmul": lambda n: (half(n, HIDDEN), half(n, HIDDEN), NORM, weight(HIDDEN, INNER)),
    "split_matmul": lambda n: (half(n, INNER), weight(INNER, HIDDEN)),
    "gated_matmul": lambda n: (half(n, 2 * INNER), weight(INNER, HIDDEN)),
    "squared_relu_matmul": lambda n: (half(n, INNER), weight(INNER, HIDDEN)),
    "gated_norm_matmul": lambda n: (
        array(n, DELTA.value_heads, DELTA.value_dim),
        gated_norm(n),
        weight(DELTA.value_heads * DELTA.value_dim, HIDDEN),
    ),
    "grouped_matmul": lambda n: (half(n, 256), (128, 0), [weight(128, 4096)] * 2),
    "matmul_silu": lambda n: (half(n, HIDDEN), weight(HIDDEN, 2 * INNER)),
    "matmul_squared_relu": lambda n: (half(n, HIDDEN), weight(HIDDEN, INNER)),
    "argmax_matmul": lambda n: (half(n, HIDDEN), weight(HIDDEN, 248_320), ints(n, 4)),
    "feed_forward": lambda n: (
        *(half(n, HIDDEN), half(n, HIDDEN), NORM),
        *(weight(HIDDEN, 2 * INNER), weight(INNER, HIDDEN)),
    ),
    "squared_relu_feed_forward": lambda n: (
        *(half(n, HIDDEN), half(n, HIDDEN), NORM),
        *(weight(HIDDEN, INNER), weight(INNER, HIDDEN)),
    ),
    # Experts.
    "moe_scores": lambda n: (half(n, HIDDEN), weight(HIDDEN, 128)),
    "moe_route": lambda n: (array(n, 128), array(128), array(n, dtype=bool), ROUTING),
    "moe_experts": lambda n: (half(n, HIDDEN), EXPERTS, Choices(ints(n, 6), array(n, 6))),
    "moe_feed_forward": lambda n: (
        *(half(n, HIDDEN), half(n, HIDDEN), NORM),
        *(Router(weight(HIDDEN, 128), None, ROUTING), EXPERTS, array(n, dtype=bool)),
    ),
    "latent_moe_feed_forward": lambda n: (
        *(half(n, HIDDEN), half(n, HIDDEN), NORM),
        *(Router(weight(HIDDEN, 128 + 1024 + 512), None, ROUTING), LATENT_EXPERTS),
        *(weight(1024 + 512, HIDDEN), array(n, dtype=bool)),
    ),
    # Attention.
    "slot_mapping": lambda n: (TABLES, ints(n), ints(n), array(n, dtype=bool)),
    "kv_write": lambda n: (
        *(KV, 1, half(n, HEADS.kv_heads, HEADS.head_dim)),
        *(half(n, HEADS.kv_heads, HEADS.head_dim), ints(n)),
    ),
    "attention_inputs": lambda n: (
        *(half(n, GATED_COLUMNS), QKNorm(half(2, HEADS.head_dim), 1e-6, True)),
        *((array(n, ANGLES), array(n, ANGLES)), KV, 1, ints(n)),
    ),
    "paged_attention": lambda n: (
        *(half(n, WIDTH, HEADS.heads, HEADS.head_dim), KV, 1, TABLES, region(n)),
    ),
    "prefill_attention": lambda n: (
        *(half(n, HEADS.heads, HEADS.head_dim), KV, 1, TABLES, chunks(n)),
    ),
    "vector_write": lambda n: (LATENTS, 1, half(n, LATENT + ROPE), ints(n)),
    "latent_attention": lambda n: (
        *(half(n, WIDTH, 128, LATENT + ROPE), LATENTS, 1, TABLES, region(n)),
    ),
    "latent_prefill_attention": lambda n: (
        *(half(n, 128, LATENT + ROPE), LATENTS, 1, TABLES, chunks(n)),
    ),
    "index_scores": lambda n: (
        TokenIndex(half(n, WIDTH, 64, 128), array(n, WIDTH, 64), INDEX_KEYS, 2048),
        *(1, ints(n, 8), ints(n, WIDTH)),
    ),
    "window_attention": lambda n: (
        half(n, WIDTH, HEADS.heads, HEADS.head_dim),
        *[half(n, WIDTH, HEADS.kv_heads, HEADS.head_dim)] * 2,
        *(KV_RINGS, 1, region(n)),
    ),
    "window_read": lambda n: (
        *(half(n, WIDTH, HEADS.heads, HEADS.head_dim), KV_RINGS, 1, region(n)),
    ),
    "window_scan": lambda n: (
        half(n, HEADS.heads, HEADS.head_dim),
        *[half(n, HEADS.kv_heads, HEADS.head_dim)] * 2,
        *(KV_RINGS, 1, tokens_of(n)),
    ),
    "window_prefill": lambda n: (
        half(n, HEADS.heads, HEADS.head_dim),
        *[half(n, HEADS.kv_heads, HEADS.head_dim)] * 2,
        *(KV_RINGS, 1, chunks(n)),
    ),
    # Recurrent layers.
    "state_select": lambda n: (delta_states(WIDTH), 1, region(n)),
    "state_write": lambda n: (
        *(delta_states(WIDTH), 1, region(n)),
        array(n, WIDTH, *delta_states(1).shape[3:]),
    ),
    "conv_update": lambda n: (
        *(half(n, WIDTH, DELTA.conv_dim), half(4, DELTA.conv_dim), DELTA_CONV, 1, region(n)),
    ),
    "conv_scan": lambda n: (
        *(half(n, DELTA.conv_dim), half(4, DELTA.conv_dim), DELTA_CONV, 1, tokens_of(n)),
    ),
    "conv_prefill": lambda n: (
        *(half(n, DELTA.conv_dim), half(4, DELTA.conv_dim), DELTA_CONV, 1, chunks(n)),
    ),
    "gdn_inputs": lambda n: (
        *(half(n, WIDTH, DELTA.projected), DELTA_PARAMS, DELTA_CONV, 1, region(n)),
    ),
    "gdn_inputs_by_channel": lambda n: (
        half(n, WIDTH, KIMI.conv_dim + KIMI.value_heads),
        half(n, WIDTH, KIMI.value_heads * KIMI.value_dim),
        *(KIMI_PARAMS, half(2, SLOTS, 3 + WIDTH, KIMI.conv_dim), 1, region(n)),
    ),
    "gdn_step": lambda n: (delta_tokens(n, WIDTH), delta_states(WIDTH), 1, region(n)),
    "gdn_scan": lambda n: (delta_tokens(n), delta_states(WIDTH), 1, tokens_of(n)),
    "gdn_replay": lambda n: (delta_tokens(n, WIDTH), delta_states(1), DELTA_RING, 1, region(n)),
    "gdn_conv_replay": lambda n: (
        *(half(n, WIDTH, DELTA.projected), DELTA_PARAMS, DELTA_CONV),
        *(delta_states(1), DELTA_RING, 1, region(n)),
    ),
    "gdn_prefill": lambda n: (delta_tokens(n), delta_states(WIDTH), 1, chunks(n)),
    "mamba2_inputs": lambda n: (
        *(half(n, WIDTH, MAMBA.projected), MAMBA_PARAMS, MAMBA_CONV, 1, region(n)),
    ),
    "mamba2_step": lambda n: (mamba_tokens(n, WIDTH), mamba_states(WIDTH), 1, region(n)),
    "mamba2_scan": lambda n: (mamba_tokens(n), mamba_states(WIDTH), 1, tokens_of(n)),
    "mamba2_replay": lambda n: (mamba_tokens(n, WIDTH), mamba_states(1), MAMBA_RING, 1, region(n)),
    "mamba2_conv_replay": lambda n: (
        *(half(n, WIDTH, MAMBA.projected), MAMBA_PARAMS, MAMBA_CONV),
        *(mamba_states(1), MAMBA_RING, 1, region(n)),
    ),
    "mamba2_prefill": lambda n: (mamba_tokens(n), mamba_states(WIDTH), 1, chunks(n)),
    # Searches in logits.
    "best_noisy": lambda n: (
        array(n, 248_320),
        RowKeys(*[array(n, dtype=jnp.uint32)] * 2),
        *(array(n, dtype=bool), LastKept(array(n), ints(n)), array(n, dtype=bool)),
    ),
    "sums_above": lambda n: (
        *(array(n, 248_320), array(n), array(n, 15)),
        *(array(n, dtype=bool), array(n, dtype=bool)),
    ),
}
OF_LATENTS = {"value_dim": LATENT, "scale": (128 + ROPE) ** -0.5}
OPTIONS = {
    "slot_mapping": {"page_size": PAGE_SIZE},
    "attention_inputs": {"heads": HEADS.heads, "gated": True},
    **dict.fromkeys(["latent_attention", "latent_prefill_attention"], OF_LATENTS),
    **dict.fromkeys(["window_attention", "window_read"], {"window": SLIDING}),
    **dict.fromkeys(["window_scan", "window_prefill"], {"window": SLIDING}),
}
SUFFIXES = "_reference", "_xla"


def functions():
    """The functions of each op by the op's name: what layers call, and what it falls back to."""
    found = {}
    for package in pkgutil.iter_modules(jaxspec.pallas.__path__, "jaxspec.pallas."):
        if not package.ispkg or package.name.endswith(".gpu"):
            continue
        imported = importlib.import_module(package.name)
        for file in pkgutil.iter_modules(imported.__path__, package.name + "."):
            if any(part in file.name for part in ("_kernel", "_block", "_tiles")):
                continue
            for name, op, function in _functions_of(file.name, getattr(imported, "__all__", ())):
                found.setdefault(op, {})[name] = function
    return found


def _functions_of(file, exported):
    """Name, op and function of each op, reference and callable class of a file."""
    members = vars(importlib.import_module(file)).items()
    own = {name: x for name, x in members if getattr(x, "__module__", None) == file}
    for name, member in own.items():
        op = name.removesuffix("_reference").removesuffix("_xla")
        is_op = op != name or name in exported or f"{name}_reference" in own
        if inspect.isfunction(member) and is_op:
            yield name, op, member
        elif (
            inspect.isclass(member)
            and "__call__" in vars(member)
            and not isinstance(member, enum.EnumType)
        ):
            yield name, op, member.__call__


FUNCTIONS = functions()


def trace(function, operands, options):
    """The shapes that `function` gives; what is no array in `operands` stays as it is."""
    leaves, tree = jax.tree.flatten(operands)
    is_array = [isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves]

    def call(*arrays):
        given = iter(arrays)
        mixed = [next(given) if is_one else x for x, is_one in zip(leaves, is_array, strict=True)]
        return function(*jax.tree.unflatten(tree, mixed), **options)

    return jax.eval_shape(call, *(x for x, is_one in zip(leaves, is_array, strict=True) if is_one))


def test_every_op_is_in_the_table():
    assert FUNCTIONS.keys() == OPS.keys()


@pytest.mark.parametrize("name", OPS)
def test_an_op_and_its_reference_trace(name):
    for rows in ROWS:
        operands, options = OPS[name](rows), OPTIONS.get(name, {})
        first, *others = (trace(each, operands, options) for each in FUNCTIONS[name].values())
        assert all(other == first for other in others), "they must give arrays of the same shapes"


@pytest.mark.parametrize("name", OPS)
def test_a_gpu_launches_no_kernel_without_rows(name, monkeypatch):
    chosen = []
    monkeypatch.setattr(dispatch, "kernels_here", lambda: (True, None))
    monkeypatch.setattr(dispatch, "note", lambda op, what, level: chosen.append((op, what)))
    for function in FUNCTIONS[name].values():
        trace(function, OPS[name](0), OPTIONS.get(name, {}))
    assert chosen == []
