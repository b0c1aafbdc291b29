"""Programs of thin models of published sizes, for GPUs that are not there."""

import json

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding
from sm90 import nothing_kept_on_disk

from benchmarks.measure.model_shapes import SHAPES
from jaxspec.api.settling import settle
from jaxspec.models import unread
from jaxspec.options.engine_options import EngineConfig
from jaxspec.parallel import ALONE
from jaxspec.plan.plan import plan_layout
from jaxspec.runner.blueprint import Blueprint
from jaxspec.runner.step import new_step
from jaxspec.sampling import make_verifier

BFLOAT16 = jnp.dtype("bfloat16")
LAYERS, ROWS = 4, 8


def blueprint_of(
    folder, name, *, config=None, drafts=0, group=ALONE, deterministic=False, **options
):
    """Of four layers with random weights: with Gated DeltaNet, the fourth is attention.

    `config` has further fields of config.json, `drafts` is a number of tokens by n-gram, and other
    options are those of `unread`.
    """
    fields = SHAPES[name].config() | {"num_hidden_layers": LAYERS} | (config or {})
    (folder / "config.json").write_text(json.dumps(fields))
    with unread(folder, BFLOAT16, load_format="dummy", group=group, **options) as found:
        model = found.model
    drafting = {"method": "ngram", "num_speculative_tokens": drafts} if drafts else None
    engine = EngineConfig(
        folder,
        load_format="dummy",
        speculative_config=drafting,
        max_num_seqs=ROWS,
        max_model_len=1024,
        num_pages=ROWS * 64 + 1,
        deterministic=deterministic,
    )
    settled = settle(engine, model, BFLOAT16, None, group)
    return Blueprint.of(
        model,
        settled.shapes,
        settled.proposer,
        dtype=BFLOAT16,
        verifier=make_verifier(settled.speculation),
        states=settled.states,
        group=group,
        is_deterministic=deterministic,
    )


def operands_of(blueprint, program, sharding):
    """Weights, tables, state and plan of a step, all with one sharding."""
    plan = jax.ShapeDtypeStruct((plan_layout(program, blueprint.config.shapes).size,), jnp.int32)
    state = blueprint.state.of(program)
    operands = blueprint.weights, blueprint.memory_usage.tables, state, plan
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), operands
    )


def compiled_in_place(h200, blueprint, program):
    """A step's HLO and its state, all of which it writes where it is."""
    operands = operands_of(blueprint, program, SingleDeviceSharding(h200))
    lowered = new_step(blueprint.config, program).lower(*operands)
    with nothing_kept_on_disk():
        compiled = lowered.compile()
    state = blueprint.state.of(program)
    held = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
    assert compiled.memory_analysis().alias_size_in_bytes == held
    return compiled.as_text(), state
