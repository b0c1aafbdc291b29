"""Speculative decoding by hand: the stages of a step, one after another, on the embedded model.

    python notebooks/one_step.py [snapshot | replay]

Three requests share a batch of two rows. A step verifies the drafts of the previous step in one
forward pass, accepts some, rolls the recurrent states back to them, and drafts again. The engine
compiles the same functions into one program (`jaxspec/runner/step.py`) and plans ahead of the
device; here each stage is called alone. At the end the tokens must equal plain greedy decoding.
"""

import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec import LLM, SamplingParams, SpeculativeConfig
from jaxspec.api.loading import EMBEDDED_MODEL
from jaxspec.models import load_model
from jaxspec.plan.plan import StepOutput
from jaxspec.plan.step_shapes import SchedulerLimits, StateConfig, StepShapes
from jaxspec.proposers import make_proposer
from jaxspec.requests.request import Request
from jaxspec.requests.sampling_features import GREEDY
from jaxspec.runner.batch_state import BatchState
from jaxspec.runner.blueprint import Blueprint
from jaxspec.runner.device_plan import DevicePlan
from jaxspec.runner.draft_inputs import draft_inputs
from jaxspec.runner.prepare import prepare
from jaxspec.runner.propose import propose
from jaxspec.runner.remap import remap, scatter_new_rows, update_page_tables
from jaxspec.runner.update import truncate_at_stop, update
from jaxspec.runner.verify import verify
from jaxspec.sampling import make_verifier
from jaxspec.scheduler.scheduler import Scheduler

FLOAT32, MTP = jnp.dtype("float32"), SpeculativeConfig("mtp", num_speculative_tokens=3)
# Prompts, and tokens to generate: a finishes first, b moves into its row, and c enters.
REQUESTS = {"import os\nimport ": 6, "def read_lines(path):\n": 18, "class Stack:\n": 8}


@functools.partial(jax.jit, static_argnums=(0, 1))
def place_rows(config, program, state, packed):
    """Stage 1, remap: row i was row `prev_positions[i]` of the previous step; -1 is a new row.

    A row is some integers. Keys, values and recurrent states stay in the slot of their request.
    """
    plan = DevicePlan.unpack(packed, program, config.shapes)
    new_rows = scatter_new_rows(plan.new_row_index, BatchState(plan.new_rows), state.rows.num_rows)
    rows = remap(state.rows, plan.prev_positions, new_rows)
    page_tables = update_page_tables(state.page_tables, new_rows, plan)
    return plan, state.replace(rows=rows, page_tables=page_tables)


@functools.partial(jax.jit, static_argnums=(0, 1))
def run_model(config, program, model, state, plan):
    """Stages 2 and 3, prepare and forward: one pass over all drafts and the prompts that enter.

    A decoding row has its last token and drafts; `state_offset` or `ring_length` selects its state.
    """
    inputs = prepare(state.rows, state.page_tables, plan, config.shapes.page_size, program)
    output, pools = model.forward(inputs.model, state.pools)
    return inputs, output, state.replace(pools=pools)


@functools.partial(jax.jit, static_argnums=0)
def accept(config, model, inputs, output):
    """Stage 4, verify: accept the drafts before the first that differs from the model's choice.

    The model's choice follows them, so each row gets `num_accepted` + 1 tokens, up to its limit.
    """
    scored = output.hidden[inputs.logits_indices]
    acceptance, _ = verify(model, scored, inputs, None, config.verifier, GREEDY)
    return truncate_at_stop(acceptance, inputs.active, inputs.first_position, inputs.produces_token)


@functools.partial(jax.jit, static_argnums=0)
def roll_back(config, inputs, acceptance, finish, plan):
    """Stage 5, update: count the accepted tokens, which selects their state. Nothing is copied.

    Snapshot: the pass stored a state after each token; `state_offset` = `num_accepted` selects one.
    Replay: the pass appended each token's update to a ring; `ring_length` counts the accepted ones.
    """
    return update(inputs.active, acceptance, finish, plan.prefill_lens, config.states)


@functools.partial(jax.jit, static_argnums=0)
def draft(config, model, state, plan, inputs, output, acceptance, active):
    """Stage 6, draft: the MTP head proposes three tokens after the newest one of each row."""
    given = draft_inputs(output, inputs, acceptance, active, plan, GREEDY)
    drafts, pools = propose(config.proposer, model, given, state.pools, tables=())
    active = active.with_fields(drafts=drafts.tokens, num_drafts=drafts.num_drafts)
    return state.replace(rows=state.rows.put(inputs.index, active), pools=pools)


def run(model, requests, states, decode):
    """Run the requests to their ends, and print each step."""
    sizes = {"max_num_seqs": 2, "max_model_len": 64, "page_size": 16, "num_pages": 16}
    shapes = StepShapes(**sizes, num_drafts=3, decode_rows=(2,), prefill_tokens=(32,))
    options = {"dtype": FLOAT32, "verifier": make_verifier(MTP), "states": states}
    blueprint = Blueprint.of(model, shapes, make_proposer(MTP, model), **options)
    config, state = blueprint.config, blueprint.memory_usage.empty_state(shapes)
    scheduler = Scheduler(shapes, SchedulerLimits())  # chooses rows, pages and slots on the host
    scheduler.add(requests)
    field = "ring_length" if states.policy == "replay" else "state_offset"
    while step := scheduler.schedule():
        plan, state = place_rows(config, step.plan.program, state, step.plan.packed)
        inputs, output, state = run_model(config, step.plan.program, model, state, plan)
        acceptance, finish = accept(config, model, inputs, output)
        active = roll_back(config, inputs, acceptance, finish, plan)
        state = draft(config, model, state, plan, inputs, output, acceptance, active)
        # The host reads tokens and counts only now: to print them, and to plan the next step.
        counts = inputs.num_draft_tokens, acceptance.num_accepted, finish, jnp.zeros_like(finish)
        columns = acceptance.tokens, *counts, state.rows.take(inputs.index).drafts
        result = StepOutput(*(np.asarray(column)[None] for column in columns))
        print(f"\nprev_positions {plan.prev_positions.tolist()}")
        for row, entry in step.rows:
            name, what = "abc"[requests.index(entry.request)], "enters with its prompt"
            if count := result.num_drafts[0, row]:  # fewer near the request's last token
                drafts = [decode([token]) for token in inputs.drafts[row, :count].tolist()]
                accepted = result.num_accepted[0, row]
                what = f"drafts {drafts}: {accepted} accepted, {count - accepted} rejected"
            emitted = [decode([token]) for token in result.by_row()[row].tokens]
            end = "finished" if finish[row] else f"{field} {getattr(active, field)[row]}"
            print(f"  {name} {what}\n    -> {emitted}, {end}")
        scheduler.collect(step, result)


def main(policy="snapshot"):
    """Run the requests by hand, and check their tokens against those of plain greedy decoding."""
    lengths = REQUESTS.values()
    params = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in lengths]
    sizes = {"max_num_seqs": 1, "max_model_len": 64, "background_compilation": False}
    with LLM(speculative_config=None, dtype="float32", **sizes) as llm:
        plain = [each.outputs[0].token_ids for each in llm.generate([*REQUESTS], params)]
    prompts = [tuple(llm.tokenizer.encode(text)) for text in REQUESTS]
    requests = [Request(*each, seed=0) for each in zip(prompts, params, strict=True)]
    states = StateConfig(policy, window=7)  # a short ring, to see it folded into the base state
    with jax.default_matmul_precision("highest"):  # GPUs would round float32 to TF32
        run(load_model(EMBEDDED_MODEL, FLOAT32), requests, states, llm.tokenizer.decode)
    for name, request, tokens in zip("abc", requests, plain, strict=True):
        print(f"\n{name}: {llm.tokenizer.decode(request.tokens)!r}")
        if request.output != list(tokens):
            raise SystemExit(f"Plain greedy decoding gives {llm.tokenizer.decode(tokens)!r}.")
    print("\nAll tokens equal those of plain greedy decoding.")


if __name__ == "__main__":
    main(*sys.argv[1:])
