"""add_norm compiles to sm_90a machine code without spills."""

import jax.numpy as jnp
import pytest
from sm90 import array, assert_lean, compile_for

from benchmarks.measure.shapes import HIDDEN
from jaxspec.pallas import dispatch
from jaxspec.pallas.norm.add_norm import add_norm
from jaxspec.pallas.norm.rms_norm import Norm

OPTIMIZED = True  # as for a user


@pytest.fixture(autouse=True)
def kernels(monkeypatch):
    """Ops run their kernels where these take the operands, though there is no GPU."""
    monkeypatch.setattr(dispatch, "runs_kernel", lambda op, why_not, **_: why_not is None)


def step(stream, pending, weight):
    return add_norm(stream, pending, Norm(weight, 1e-6, zero_centred=True))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("features", [512, 2688, 4480, *HIDDEN.values(), 8192])
def test_tokens_are_added_at_every_model_s_width(h200, monkeypatch, capfd, features, dtype):
    tokens, weight = array(4, features, dtype=dtype), array(features, dtype=dtype)
    compiled = compile_for(h200, monkeypatch, step, (tokens, tokens, weight))
    assert_lean(compiled, capfd.readouterr().out)


@pytest.mark.parametrize("features", [1024, 2688, 5120])
def test_parts_are_added(h200, monkeypatch, capfd, features):
    stream, weight = (array(*dims, features, dtype=jnp.bfloat16) for dims in ((4,), ()))
    compiled = compile_for(h200, monkeypatch, step, (stream, array(8, 4, features), weight))
    assert_lean(compiled, capfd.readouterr().out)
