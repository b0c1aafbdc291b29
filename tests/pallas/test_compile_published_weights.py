"""Steps of models in FP8 compile for an H200 that is not there, and every matmul has its kernel."""

import json

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import SingleDeviceSharding
from sm90 import nothing_kept_on_disk

from benchmarks.measure.model_shapes import SHAPES
from jaxspec import device
from jaxspec.api.settling import settle
from jaxspec.models import unread
from jaxspec.models.layers.weight_matrix import forms_of
from jaxspec.options.engine_options import EngineConfig
from jaxspec.pallas import dispatch
from jaxspec.parallel import ALONE
from jaxspec.plan.plan import Program, plan_layout
from jaxspec.requests.sampling_features import GREEDY
from jaxspec.runner.blueprint import Blueprint
from jaxspec.runner.step import new_step
from jaxspec.sampling import make_verifier

BFLOAT16 = jnp.dtype("bfloat16")
OPS = ("norm_matmul", "split_matmul", "gated", "matmul_silu", "squared_relu", "moe_experts")


def blueprint_of(name, activation_dtype, folder):
    """Four layers of a published size, in blocks of 128 x 128."""
    fields = SHAPES[name].config() | {"num_hidden_layers": 4}
    (folder / "config.json").write_text(json.dumps(fields))
    quantised = {"quantization": "fp8", "activation_dtype": activation_dtype}
    with unread(folder, BFLOAT16, load_format="dummy", **quantised) as found:
        model = found.model
    assert sum(form is not None for form in forms_of(model)) > 8
    drafting = {"method": "ngram", "num_speculative_tokens": 2}
    options = EngineConfig(
        folder,
        load_format="dummy",
        speculative_config=drafting,
        max_num_seqs=8,
        max_model_len=1024,
        num_pages=8 * 64 + 1,
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


@pytest.mark.mosaic
@pytest.mark.parametrize("activation_dtype", [None, "float8_e4m3fn"])
@pytest.mark.parametrize("name", ["qwen3.5-9b", "qwen3.5-35b-a3b"])
@pytest.mark.parametrize("shape", [(1, 0, 2), (4, 0, 2), (1, 64, 0)], ids=str)
def test_steps_of_any_number_of_tokens_run_kernels(
    h200, monkeypatch, tmp_path, name, shape, activation_dtype
):
    """Of 3, 12 and 65 tokens."""
    monkeypatch.setattr(device, "default_device", lambda: h200)
    blueprint = blueprint_of(name, activation_dtype, tmp_path)
    rows, prompt, drafts = shape
    program = Program(rows, prompt, GREEDY, 1, drafts)
    where = SingleDeviceSharding(h200)
    plan = jax.ShapeDtypeStruct((plan_layout(program, blueprint.config.shapes).size,), jnp.int32)
    state = blueprint.state.of(program)
    operands = blueprint.weights, blueprint.memory_usage.tables, state, plan
    placed = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where), operands
    )
    with dispatch.choices() as chosen:
        lowered = new_step(blueprint.config, program).lower(*placed)
    without = {(op, how) for op, how, _ in chosen if op.startswith(OPS) and how != "kernel"}
    assert not without
    with nothing_kept_on_disk():
        lowered.compile()
