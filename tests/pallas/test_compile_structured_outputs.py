"""Programs of structured outputs compile for an H200 that is not there: all state in place."""

import json
import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import SingleDeviceSharding
from sm90 import nothing_kept_on_disk

from benchmarks.measure.model_shapes import SHAPES
from jaxspec import device
from jaxspec.api.settling import settle
from jaxspec.models import unread
from jaxspec.options.engine_options import EngineConfig
from jaxspec.parallel import ALONE
from jaxspec.plan.plan import AUTOMATON, MASKS, ForwardPass, Program, plan_layout
from jaxspec.requests.sampling_features import EVERYTHING
from jaxspec.runner.blueprint import Blueprint
from jaxspec.runner.step import new_step
from jaxspec.sampling import make_verifier

BFLOAT16 = jnp.dtype("bfloat16")
ROWS, DRAFTS = 8, 3
NGRAM = {"method": "ngram", "num_speculative_tokens": DRAFTS}


@pytest.fixture
def blueprint(h200, monkeypatch, tmp_path):
    """One layer of attention after three of Gated DeltaNet, with 248,320 ids."""
    monkeypatch.setattr(device, "default_device", lambda: h200)
    fields = SHAPES["qwen3.5-9b"].config() | {"num_hidden_layers": 4}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    with unread(tmp_path, BFLOAT16, load_format="dummy") as found:
        model = found.model
    options = EngineConfig(
        tmp_path,
        load_format="dummy",
        speculative_config=NGRAM,
        max_num_seqs=ROWS,
        max_model_len=1024,
        num_pages=ROWS * 64 + 1,
    )
    settled = settle(options, model, BFLOAT16, None, ALONE)
    return Blueprint.of(
        model,
        settled.shapes,
        settled.proposer,
        dtype=BFLOAT16,
        verifier=make_verifier(settled.speculation),
        states=settled.states,
        group=ALONE,
    )


HALF = ForwardPass(ROWS, DRAFTS)
WHOLE = Program(ROWS, 0, EVERYTHING, 1, DRAFTS)


@pytest.mark.mosaic
@pytest.mark.parametrize("program", [MASKS, AUTOMATON, WHOLE, HALF, HALF.rest])
def test_the_donated_state_is_written_in_place(h200, blueprint, program):
    where, shapes = SingleDeviceSharding(h200), blueprint.config.shapes
    state = blueprint.state.of(program)
    plan = jax.ShapeDtypeStruct((plan_layout(program, shapes).size,), jnp.int32)
    operands = blueprint.weights, blueprint.memory_usage.tables, state, plan
    placed = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where), operands
    )
    lowered = new_step(blueprint.config, program).lower(*placed)
    with nothing_kept_on_disk():
        compiled = lowered.compile()
    held = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
    assert compiled.memory_analysis().alias_size_in_bytes == held
    held = jax.tree.leaves(state.tables) or jax.tree.leaves(state.forward)
    largest = ",".join(map(str, max(held, key=lambda leaf: leaf.size).shape))
    assert not re.search(rf"\[{largest}\]\S* copy\(", compiled.as_text())
