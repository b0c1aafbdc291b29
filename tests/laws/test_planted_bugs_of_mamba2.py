"""Bugs that Mamba2 has shipped with elsewhere, planted here and seen by the reference's logits."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import single_request
from harness import FIXTURES, GREEDY, REPLAY, Harness, model
from safetensors.numpy import load_file

from jaxspec.models import load_model
from jaxspec.models.layers import mamba2
from jaxspec.models.layers.mamba2 import Mamba2
from jaxspec.pallas.mamba2 import conv_replay, inputs

real_split, real_inputs = inputs.split_tokens, inputs.mamba2_inputs
real_norm, real_conv_prefill = mamba2.GatedGroupNorm, mamba2.conv_prefill


def step_sizes_clamped(y, steps, params):
    tokens = real_split(y, steps, params)
    return tokens._replace(dt=jnp.maximum(tokens.dt, 0.05))


def groups_of_b_and_c_swapped(y, steps, params):
    tokens = real_split(y, steps, params)
    return tokens._replace(b=tokens.b[..., ::-1, :], c=tokens.c[..., ::-1, :])


def heads_take_groups_in_turn(y, steps, params):
    """Head h takes group h modulo the groups, in place of neighbours sharing one."""
    tokens = real_split(y, steps, params)
    heads, groups = params.heads.heads, params.heads.groups
    order = np.argsort(np.arange(heads) % groups, kind="stable")
    return tokens._replace(x=tokens.x[..., order, :], dt=tokens.dt[..., order])


def without_d(y, steps, params):
    tokens = real_split(y, steps, params)
    return tokens._replace(d=jnp.zeros_like(tokens.d))


def norm_before_the_gate(*operands, **fields):
    return real_norm(*operands, **{**fields, "gate_first": False})


def one_norm_for_all_groups(*operands, **fields):
    return real_norm(*operands, **{**fields, "groups": 1})


def bias_left_out(*operands, bias):
    return real_conv_prefill(*operands, bias=None)


BUGS = [
    (mamba2, "split_tokens", step_sizes_clamped),
    (mamba2, "split_tokens", groups_of_b_and_c_swapped),
    (mamba2, "split_tokens", heads_take_groups_in_turn),
    (mamba2, "split_tokens", without_d),
    (mamba2, "GatedGroupNorm", norm_before_the_gate),
    (mamba2, "GatedGroupNorm", one_norm_for_all_groups),
    (mamba2, "conv_prefill", bias_left_out),
]


def error(fixture):
    """The largest of a prompt's scores."""
    expected = load_file(FIXTURES / fixture / "reference.safetensors")
    request = single_request.SingleRequest(load_model(FIXTURES / fixture, jnp.float32))
    _, logits = request.prefill(expected["prompt_ids"])
    return np.abs(logits - expected["logits_full"][: len(logits)]).max()


def test_without_a_bug_the_scores_are_those_of_the_reference():
    assert error("mamba2") < 5e-4


def bug_name(value):
    return value.__name__ if callable(value) and not isinstance(value, type) else ""


@pytest.mark.few(1)
@pytest.mark.parametrize(("module", "name", "bug"), BUGS, ids=bug_name)
def test_the_reference_sees(module, name, bug, monkeypatch):
    monkeypatch.setattr(module, name, bug)
    program = single_request._trunk.__wrapped__
    monkeypatch.setattr(
        single_request, "_trunk", jax.jit(lambda *given: program(*given), static_argnums=0)
    )
    assert error("mamba2") > 0.1


# Bugs between steps.


def convolution_stale_after_a_fold(projected, params, pool, layer, rows):
    """A row that folds its ring forgets to store what its convolution will read."""
    tokens, after = real_inputs(projected, params, pool, layer, rows)
    width = projected.shape[1]
    folds = (rows.ring_length > REPLAY.window - width) & (rows.slots > 0)
    target = jnp.where(folds, rows.slots, 0)
    return tokens, after.at[layer, target].set(pool[layer, target])


@pytest.mark.soak
def test_the_laws_see_a_convolution_that_a_fold_leaves_stale(monkeypatch, fresh_programs):
    monkeypatch.setattr(conv_replay, "mamba2_inputs", convolution_stale_after_a_fold)
    engine = Harness("mamba2", states=REPLAY)
    engine.add(tuple(range(9)), dataclasses.replace(GREEDY, max_tokens=24))
    with pytest.raises(AssertionError):
        engine.run().check()


def test_without_the_bug_the_laws_hold_over_as_many_folds():
    engine = Harness("mamba2", states=REPLAY)
    engine.add(tuple(range(9)), dataclasses.replace(GREEDY, max_tokens=24))
    assert engine.run().check() == 0
    assert all(isinstance(layer.mixer, Mamba2) for layer in model("mamba2").trunk.layers)
