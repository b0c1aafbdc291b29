"""The public Triton kernels that do the work of ours, for `run.py` to time beside; needs torch.

Each runs where its package is installed, as that ships it, on the operands and the pool of the
case: JAX's own arrays, which torch writes too. So the shapes, the values, the dtypes and the layout
of the states are ours; what a kernel does less or more than ours, its function below says. To add
one, write a function that gives `call(layer)`, and put it into `KERNELS`. Those of the recurrent
prefills try some eighty configurations at each new shape of heads (`triton_tuning.py`).
"""

import dataclasses
import pkgutil
import sys
from collections.abc import Callable, Iterator

import jax
import torch
from torch.nn.functional import pad

from benchmarks.kernels.case import Case
from benchmarks.kernels.public.attention import paged_attention, prefill_attention
from benchmarks.kernels.public.triton_tuning import compiling_at_once
from benchmarks.measure import record

CHUNK = 128  # tokens, in the published Mamba2 models


def programs(case: Case, layers: int, calls: int) -> Iterator[tuple[str, Callable[[int], float]]]:
    """The name and the program of each public kernel that is installed and takes the case.

    A program is a CUDA graph of `calls` calls, call i on layer i of so many; `program(count)` is
    the seconds that `count` of them take on the device. What fails says so on stderr.
    """
    known = KERNELS.get(case.op, {})
    usable = [path for path in known if record.installed(_package(path))]
    if not usable or not torch.cuda.is_available():
        return
    pool, operands = as_torch(case.pool(layers)), as_torch(case.operands)
    for path in usable:
        try:
            call = known[path](pkgutil.resolve_name(path), pool, *operands)
            program = call and _graph(call, layers, calls)
        except Exception as error:
            print(f"{case.op}: {path}: {error!r}", file=sys.stderr, flush=True)
            continue
        if program:
            package, name = _package(path), path.partition(":")[2]
            yield f"{package} {sys.modules[package].__version__} {name}", program


def _package(path):
    return path.partition(":")[0].partition(".")[0]


def as_torch(arrays):
    """A tree of JAX's arrays, in their memory. Whoever writes these no longer reads those."""
    return jax.tree.map(torch.from_dlpack, jax.block_until_ready(arrays))


@torch.no_grad()
def _graph(call, layers, calls):
    with compiling_at_once():
        for _ in range(2):  # compiles, tries the configurations that it may have, fills its caches
            call(0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # JAX has threads, too
        for index in range(calls):
            call(index % layers)

    def seconds(count):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(count):
            graph.replay()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1000

    return seconds


def _starts(length):
    """Return offsets of rows of these lengths in a flat array, and the end of the last."""
    return pad(length.cumsum(0, dtype=torch.int32), (1, 0))


def _candidates(pool, slots):
    """The states `[layers, slots * width, ...]`, and where a row's candidates are in a layer's."""
    width = pool.shape[2]
    places = slots[:, None] * width + torch.arange(width, dtype=slots.dtype, device=slots.device)
    return pool.flatten(1, 2), places


def _gdn_index(places, rows):
    """Indices of rows and their states; with drafts also of the first candidate, from 1."""
    index = {"cu_seqlens": _starts(rows.query_len), "ssm_state_indices": places}
    return index | ({"num_accepted_tokens": rows.state_offset + 1} if places.shape[1] > 1 else {})


def _gdn_step(function, pool, tokens, rows):
    """The same work."""
    states, places = _candidates(pool, rows.slots)
    flat = [x.flatten(0, 1)[None] for x in tokens]
    options = _gdn_index(places, rows)

    def call(layer):
        return function(*flat, scale=1.0, initial_state=states[layer], **options)[0]

    return call


def _gdn_step_gating(function, pool, tokens, rows):
    """More: it makes the gates."""
    q, k, v, g, beta = tokens
    states, places = _candidates(pool, rows.slots)
    q, k, v, *gates = (x.flatten(0, 1)[None] for x in (q, k, v, *_raw_gates(g, beta)))
    zeros = torch.zeros(g.shape[-1], device=g.device)
    operands = zeros, *gates, zeros, q, k, v
    options = _gdn_index(places, rows)

    def call(layer):
        return function(*operands, scale=1.0, initial_state=states[layer], **options)[0]

    return call


def _gdn_step_packed(function, pool, tokens, rows):
    """More: it makes the gates. One token a row."""
    q, k, v, g, beta = tokens
    if q.shape[1] > 1:
        return None
    states, places = _candidates(pool, rows.slots)
    packed = torch.cat([x.flatten(1) for x in (q, k, v)], 1)
    gates = [x[:, 0] for x in _raw_gates(g, beta)]
    zeros, out = torch.zeros(g.shape[-1], device=g.device), torch.empty_like(v)
    operands = packed, *gates, zeros, zeros

    def call(layer):
        return function(*operands, 1.0, states[layer], out, places[:, 0])[0]

    return call


def _raw_gates(g, beta):
    """Return the outputs that give them: `g = -softplus(a)`, `beta = sigmoid(b)`."""
    return torch.log(torch.expm1(-g)), torch.logit(beta)


def _gdn_prefill_vllm(function, pool, tokens, chunks):
    """The same work, from zero states, as the cases begin their prompts.

    But for the outputs, in 16 bits, and the final states, which it leaves outside the pool.
    """
    flat, start = [x[None] for x in tokens], chunks.query_start

    def call(layer):
        return function(*flat, scale=1.0, output_final_state=True, cu_seqlens=start)

    return call


def _gdn_prefill_fla(function, pool, tokens, chunks):
    """As vLLM's; the final states are `[key_dim, value_dim]`."""
    chunks = dataclasses.replace(chunks, query_start=chunks.query_start.long())
    return _gdn_prefill_vllm(function, pool, tokens, chunks)


def _mamba2_step_vllm(function, pool, tokens, rows):
    """The same work."""
    states, places = _candidates(pool, rows.slots)
    options = {"state_batch_indices": places}
    if tokens.x.shape[1] > 1:
        options["num_accepted_tokens"] = rows.state_offset + 1
        options["cu_seqlens"] = _starts(rows.query_len)
    x, *operands = _mamba2_operands(states, tokens)
    options["out"] = torch.empty_like(x, dtype=torch.float32)

    def call(layer):
        function(states[layer], x, *operands, **options)
        return options["out"]

    return call


def _mamba2_step_mamba_ssm(function, pool, tokens, rows):
    """The same work, but for the outputs, in the dtype of `x`. One token a row."""
    if tokens.x.shape[1] > 1:
        return None
    states, places = _candidates(pool, rows.slots)
    *operands, bias = _mamba2_operands(states, tokens)

    def call(layer):
        options = {"dt_bias": bias, "state_batch_indices": places[:, 0]}
        return function(states[layer], *operands, **options)

    return call


def _mamba2_operands(states, tokens):
    """Flat `x`, `dt`, `A`, `B`, `C`, `D` and a bias of 0; strides are 0 over one head's values."""
    _, _, heads, head_dim, state_dim = states.shape
    x, dt, b, c = (y.flatten(0, 1) for y in (tokens.x, tokens.dt, tokens.b, tokens.c))
    a = tokens.a[:, None, None].expand(heads, head_dim, state_dim)
    d, bias = (y[:, None].expand(heads, head_dim) for y in (tokens.d, torch.zeros_like(tokens.d)))
    return x, dt[..., None].expand(x.shape), a, b, c, d, bias


def _mamba2_prefill_vllm(function, pool, tokens, chunks):
    """The same work, from zero states, but for the final ones, which it leaves outside the pool.

    Prompts must be whole chunks.
    """
    x, dt, a, b, c, d = tokens
    start = chunks.query_start
    chunk_starts = torch.arange(0, len(x) + 1, CHUNK, dtype=start.dtype, device=x.device)
    last = start[1:] // CHUNK - 1
    owner = torch.searchsorted(start, chunk_starts[:-1], right=True, out_int32=True) - 1
    out = torch.empty_like(x, dtype=torch.float32)
    index = start, chunk_starts, last, owner

    def call(layer):
        states = function(x, dt, a, b, c, CHUNK, *index, out, D=d, state_dtype=torch.float32)
        return out, states

    return call


def _mamba2_prefill_mamba_ssm(function, pool, tokens, chunks):
    """As vLLM's, with outputs in the dtype of `x`. Prompts must be equally long."""
    x, dt, a, b, c, d = tokens
    x, dt, b, c = (y.unflatten(0, (len(chunks.slots), -1)) for y in (x, dt, b, c))

    def call(layer):
        return function(x, dt, a, b, c, CHUNK, D=d, return_final_states=True)

    return call


def _conv_update(function, pool, xs, taps, decay, rows):
    """The same work in the place of `x`, but for the products, rounded to its dtype.

    A row needs one input less: what it keeps of the window moves, and no position is asked for.
    A negative `x` and taps above 0 keep it off 0 and within 0.28, as often as it comes round.
    """
    width = xs[0].shape[1]
    xs = [-x.abs().flatten(0, 1) for x in xs]
    weight = taps.abs().clamp(min=0.5).T.contiguous()
    windows = pool[:, :, 1:].transpose(2, 3)
    options = {"activation": "silu", "conv_state_indices": rows.slots}
    if width > 1:
        options["num_accepted_tokens"] = rows.state_offset + 1
        options["query_start_loc"] = _starts(rows.query_len)
        options["max_query_len"] = width

    def call(layer):
        return function(xs[layer % len(xs)], windows[layer], weight, **options)

    return call


_VLLM = "vllm.model_executor.layers"
_GDN = f"{_VLLM}.fla.ops.fused_recurrent:fused_recurrent_gated_delta_rule"
_GATING = f"{_VLLM}.fla.ops.fused_sigmoid_gating:fused_sigmoid_gating_delta_rule_update"
_SCAN = "mamba_chunk_scan_combined"
_ATTENTION = "vllm.v1.attention.ops.triton_unified_attention:unified_attention"
KERNELS: dict[str, dict[str, Callable]] = {
    "gdn_step": {
        _GDN: _gdn_step,
        _GATING: _gdn_step_gating,
        f"{_GDN}_packed_decode": _gdn_step_packed,
    },
    "gdn_prefill": {
        f"{_VLLM}.fla.ops.chunk:chunk_gated_delta_rule": _gdn_prefill_vllm,
        "fla.ops.gated_delta_rule:chunk_gated_delta_rule": _gdn_prefill_fla,
    },
    "mamba2_step": {
        f"{_VLLM}.mamba.ops.mamba_ssm:selective_state_update": _mamba2_step_vllm,
        "mamba_ssm.ops.triton.selective_state_update:selective_state_update": (
            _mamba2_step_mamba_ssm
        ),
    },
    "mamba2_prefill": {
        f"{_VLLM}.mamba.ops.ssd_combined:{_SCAN}_varlen": _mamba2_prefill_vllm,
        f"mamba_ssm.ops.triton.ssd_combined:{_SCAN}": _mamba2_prefill_mamba_ssm,
    },
    "paged_attention": {_ATTENTION: paged_attention},
    "prefill_attention": {_ATTENTION: prefill_attention},
    "conv_update": {f"{_VLLM}.mamba.ops.causal_conv1d:causal_conv1d_update": _conv_update},
}
