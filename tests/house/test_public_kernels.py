"""Public kernels beside ours: how they are asked, compiled, timed and told of; none runs here."""

import importlib
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention import decode_rows, prompt_chunks

from jaxspec.pallas.attention.paged import paged_attention_reference


def test_the_fastest_public_kernel_is_named(monkeypatch):
    kernels = importlib.import_module("benchmarks.kernels.run")
    programs = {"a 1.0 f": lambda count: 4e-3 * count, "b 2.0 g": lambda count: 2e-3 * count}
    stand_in = types.SimpleNamespace(programs=lambda case, layers, calls: programs.items())
    monkeypatch.setitem(sys.modules, "benchmarks.kernels.public.recurrent", stand_in)
    monkeypatch.setattr(
        importlib.import_module("benchmarks.kernels.public"), "recurrent", stand_in, raising=False
    )
    monkeypatch.setattr(kernels.record, "installed", lambda name: name == "torch")
    assert kernels.public(None, 2, 10) == {"public_us": 200.0, "public": "b 2.0 g"}
    programs.clear()
    assert kernels.public(None, 2, 10) == {}
    monkeypatch.setattr(kernels.record, "installed", lambda name: False)
    assert kernels.public(None, 2, 10) == {}


def test_all_configurations_are_compiled_before_one_is_tried(monkeypatch):
    calls = []

    class Kernel:
        def run(self, *args, n, **options):
            calls.append((args, n, options))
            if n == 2:
                raise ValueError("does not compile")

    class Autotuner:
        arg_names, keys, fn = ("x", "size"), ("size",), Kernel()
        base_fn = staticmethod(test_all_configurations_are_compiled_before_one_is_tried)
        configs = [types.SimpleNamespace(all_kwargs=lambda n=n: {"n": n}) for n in (1, 2)]

        def run(self, *args, **kwargs):
            calls.append("tuned")
            return args

    runtime = types.SimpleNamespace(autotuner=types.SimpleNamespace(Autotuner=Autotuner))
    monkeypatch.setitem(sys.modules, "triton", types.SimpleNamespace(runtime=runtime))
    monkeypatch.setitem(sys.modules, "triton.runtime", runtime)
    compiling_at_once = importlib.import_module(
        "benchmarks.kernels.public.triton_tuning"
    ).compiling_at_once
    kernel, untouched = Autotuner(), Autotuner.run
    with compiling_at_once():
        for size in (3, 3, 4):
            assert kernel.run("x", size, grid=(7,)) == ("x", size)
    assert Autotuner.run is untouched
    threads = {"grid": (1,), "warmup": True}
    compiled = {size: [(("x", size), n, threads) for n in (1, 2)] for size in (3, 4)}
    assert sorted(calls[:2], key=str) == compiled[3] and calls[2:4] == ["tuned"] * 2
    assert sorted(calls[4:6], key=str) == compiled[4] and calls[6:] == ["tuned"]


@pytest.mark.parity
def test_vllms_attention_is_asked_for_the_work_of_ours(monkeypatch):
    """It gets a stand-in's answers: attention over what the operands say."""
    torch = pytest.importorskip("torch")
    public_attention = importlib.import_module("benchmarks.kernels.public.attention")

    def function(q, k, v, out, *, cu_seqlens_q, seqused_k, block_table, softmax_scale, **options):
        assert options["max_seqlen_q"] == int(cu_seqlens_q.diff().max())
        assert options["max_seqlen_k"] == int(seqused_k.max()) and options["causal"]
        group = q.shape[1] // k.shape[2]
        for row, length in enumerate(seqused_k.tolist()):
            mine = slice(int(cu_seqlens_q[row]), int(cu_seqlens_q[row + 1]))
            keys, values = (
                x[block_table[row]].flatten(0, 1)[:length].repeat_interleave(group, 1)
                for x in (k, v)
            )
            count = mine.stop - mine.start
            seen = torch.ones(count, length, dtype=torch.bool).tril(length - count)
            scores = torch.einsum("qhd,khd->hqk", q[mine], keys) * softmax_scale
            weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
            out[mine] = torch.einsum("hqk,khd->qhd", weights, values)

    rng = np.random.default_rng(0)
    kv = rng.normal(size=(2, 2, 7, 16, 2, 8)).astype(np.float16).astype(np.float32)
    queries = rng.normal(size=(2, 3, 4, 8)).astype(np.float32)
    tables = np.array([[0, 0, 0], [1, 2, 3], [4, 5, 6]], np.int32)
    rows = decode_rows([2, 1], [20, 37], [3, 3])
    chunks = prompt_chunks([2, 1], [20, 37], [0, 3, 6])
    expected = np.asarray(paged_attention_reference(queries, kv, 1, tables, rows))
    regions = tables, rows, chunks
    tables, rows, chunks = jax.tree.map(lambda x: torch.from_numpy(np.array(x)), regions)
    pool = torch.from_numpy(kv).double(), torch.from_numpy(queries).double()
    out = public_attention.paged_attention(function, pool, tables, rows)(1)
    np.testing.assert_allclose(out.reshape(queries.shape), expected, atol=1e-5)
    flat = pool[0], pool[1].flatten(0, 1)
    call = public_attention.prefill_attention(function, flat, tables, chunks)
    np.testing.assert_allclose(call(1).reshape(queries.shape), expected, atol=1e-5)
    single = torch.from_numpy(kv), torch.from_numpy(queries)
    assert public_attention.paged_attention(function, single, tables, rows) is None


@pytest.mark.parity
def test_a_public_kernel_that_fails_says_so(monkeypatch, capsys):
    public_kernels = importlib.import_module("benchmarks.kernels.public.recurrent")

    def build(function, pool, operand):
        return lambda layer: function(pool[layer] + operand).item()

    def fail(function, pool, operand):
        raise ValueError("of no use\nhere")

    kernels = {
        "absent_package.module:function": build,
        "torch:nothing": build,
        "torch:sum": build,
        "torch:min": fail,
        "torch:max": lambda *_: None,
    }
    monkeypatch.setitem(public_kernels.KERNELS, "op", kernels)
    monkeypatch.setattr(public_kernels.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(public_kernels, "_graph", lambda call, layers, calls: call)
    case = types.SimpleNamespace(op="op", pool=lambda layers: jnp.ones((layers, 3)))
    case.operands = (jnp.ones(3),)
    ((name, program),) = public_kernels.programs(case, 2, 10)
    assert name == f"torch {public_kernels.torch.__version__} sum"
    assert program(1) == 6
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert lines[0].startswith("op: torch:nothing: AttributeError(")
    assert lines[1] == r"op: torch:min: ValueError('of no use\nhere')"
