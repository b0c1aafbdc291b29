"""The public Triton kernels that do the work of ours, for `kernels.py` to time beside; needs torch.

Each runs where its package is installed, as that ships it, on the operands and the pool of the
case: JAX's own arrays, which torch writes too. So the shapes, the values, the dtypes and the layout
of the states are ours; what a kernel does less or more than ours, its function below says. To add
one, write a function that gives `call(layer)`, and put it into `KERNELS`. Those of the recurrent
prefills try some eighty configurations at each new shape of heads (`triton_tuning.py`).
"""

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
    """Of rows of so many tokens laid flat, where each begins, and the end."""
    return pad(length.cumsum(0, dtype=torch.int32), (1, 0))


def _candidates(pool, slots):
    """The states `[layers, slots * width, ...]`, and where a row's candidates are in a layer's."""
    width = pool.shape[2]
    places = slots[:, None] * width + torch.arange(width, dtype=slots.dtype, device=slots.device)
    return pool.flatten(1, 2), places


def _gdn_index(places, offset, length):
    """Of drafted rows also which candidate begins, counted from 1."""
    index = {"cu_seqlens": _starts(length), "ssm_state_indices": places}
    return index | ({"num_accepted_tokens": offset + 1} if places.shape[1] > 1 else {})


def _gdn_step(function, pool, q, k, v, g, beta, slots, offset, length):
    """The same work."""
    states, places = _candidates(pool, slots)
    tokens = [x.flatten(0, 1)[None] for x in (q, k, v, g, beta)]
    options = _gdn_index(places, offset, length)

    def call(layer):
        return function(*tokens, scale=1.0, initial_state=states[layer], **options)[0]

    return call


def _gdn_step_gating(function, pool, q, k, v, g, beta, slots, offset, length):
    """More: it makes the gates."""
    states, places = _candidates(pool, slots)
    q, k, v, *gates = (x.flatten(0, 1)[None] for x in (q, k, v, *_raw_gates(g, beta)))
    zeros = torch.zeros(g.shape[-1], device=g.device)
    tokens = zeros, *gates, zeros, q, k, v
    options = _gdn_index(places, offset, length)

    def call(layer):
        return function(*tokens, scale=1.0, initial_state=states[layer], **options)[0]

    return call


def _gdn_step_packed(function, pool, q, k, v, g, beta, slots, offset, length):
    """More: it makes the gates. One token a row."""
    if q.shape[1] > 1:
        return None
    states, places = _candidates(pool, slots)
    packed = torch.cat([x.flatten(1) for x in (q, k, v)], 1)
    gates = [x[:, 0] for x in _raw_gates(g, beta)]
    zeros, out = torch.zeros(g.shape[-1], device=g.device), torch.empty_like(v)
    tokens = packed, *gates, zeros, zeros

    def call(layer):
        return function(*tokens, 1.0, states[layer], out, places[:, 0])[0]

    return call


def _raw_gates(g, beta):
    """What a projection would put out for them: `g = -softplus(a)`, `beta = sigmoid(b)`."""
    return torch.log(torch.expm1(-g)), torch.logit(beta)


def _gdn_prefill_vllm(function, pool, q, k, v, g, beta, slots, offset, computed, start):
    """The same work, from zero states, as the cases begin their prompts.

    But for the outputs, in 16 bits, and the final states, which it leaves outside the pool.
    """
    tokens = [x[None] for x in (q, k, v, g, beta)]

    def call(layer):
        return function(*tokens, scale=1.0, output_final_state=True, cu_seqlens=start)

    return call


def _gdn_prefill_fla(function, pool, *operands):
    """As vLLM's; the final states are `[key_dim, value_dim]`."""
    return _gdn_prefill_vllm(function, pool, *operands[:-1], operands[-1].long())


def _mamba2_step_vllm(function, pool, x, dt, a, b, c, d, slots, offset, length):
    """The same work."""
    states, places = _candidates(pool, slots)
    options = {"state_batch_indices": places}
    if x.shape[1] > 1:
        options |= {"num_accepted_tokens": offset + 1, "cu_seqlens": _starts(length)}
    x, dt, b, c = (y.flatten(0, 1) for y in (x, dt, b, c))
    tokens = x, *_mamba2_operands(states, x, dt, a, b, c, d)
    options["out"] = torch.empty_like(x, dtype=torch.float32)

    def call(layer):
        function(states[layer], *tokens, **options)
        return options["out"]

    return call


def _mamba2_step_mamba_ssm(function, pool, x, dt, a, b, c, d, slots, offset, length):
    """The same work, but for the outputs, in the dtype of `x`. One token a row."""
    if x.shape[1] > 1:
        return None
    states, places = _candidates(pool, slots)
    x, dt, b, c = (y.flatten(0, 1) for y in (x, dt, b, c))
    dt, a, b, c, d, bias = _mamba2_operands(states, x, dt, a, b, c, d)

    def call(layer):
        tokens = states[layer], x, dt, a, b, c, d
        return function(*tokens, dt_bias=bias, state_batch_indices=places[:, 0])

    return call


def _mamba2_operands(states, x, dt, a, b, c, d):
    """`dt`, `A`, `B`, `C`, `D` and a bias of 0, with strides of 0 where one value is a head's."""
    _, _, heads, head_dim, state_dim = states.shape
    a = a[:, None, None].expand(heads, head_dim, state_dim)
    d, bias = (y[:, None].expand(heads, head_dim) for y in (d, torch.zeros_like(d)))
    return dt[..., None].expand(x.shape), a, b, c, d, bias


def _mamba2_prefill_vllm(function, pool, x, dt, a, b, c, d, slots, offset, computed, start):
    """The same work, from zero states, but for the final ones, which it leaves outside the pool.

    Prompts must be whole chunks.
    """
    chunks = torch.arange(0, len(x) + 1, CHUNK, dtype=start.dtype, device=x.device)
    last = start[1:] // CHUNK - 1
    owner = torch.searchsorted(start, chunks[:-1], right=True, out_int32=True) - 1
    out = torch.empty_like(x, dtype=torch.float32)
    index = start, chunks, last, owner

    def call(layer):
        states = function(x, dt, a, b, c, CHUNK, *index, out, D=d, state_dtype=torch.float32)
        return out, states

    return call


def _mamba2_prefill_mamba_ssm(function, pool, x, dt, a, b, c, d, slots, offset, computed, start):
    """As vLLM's, with outputs in the dtype of `x`. Prompts must be equally long."""
    x, dt, b, c = (y.unflatten(0, (len(slots), -1)) for y in (x, dt, b, c))

    def call(layer):
        return function(x, dt, a, b, c, CHUNK, D=d, return_final_states=True)

    return call


def _conv_update(function, pool, xs, taps, decay, slots, accepted, length):
    """The same work in the place of `x`, but for the products, rounded to its dtype.

    A row needs one input less: what it keeps of the window moves, and no position is asked for.
    A negative `x` and taps above 0 keep it off 0 and within 0.28, as often as it comes round.
    """
    width = xs[0].shape[1]
    xs = [-x.abs().flatten(0, 1) for x in xs]
    weight = taps.abs().clamp(min=0.5).T.contiguous()
    windows = pool[:, :, 1:].transpose(2, 3)
    options = {"activation": "silu", "conv_state_indices": slots}
    if width > 1:
        options |= {"num_accepted_tokens": accepted + 1, "query_start_loc": _starts(length)}
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
