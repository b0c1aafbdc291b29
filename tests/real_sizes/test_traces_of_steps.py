"""Whole steps trace: thin models at published vocabularies, with rows to decode, prompts, or both.

Nothing is computed or allocated: weights, tables and state are shapes (`jax.eval_shape`).
"""

import dataclasses
import functools
import json
from typing import NamedTuple

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from harness import FIXTURES

from jaxspec.api.settling import settle
from jaxspec.cache import state_policy
from jaxspec.models import parse_config, unread, unread_model_or_head
from jaxspec.models.config import READ_SLIDING
from jaxspec.models.layers.decoder import FEED_FORWARDS, MIXERS
from jaxspec.options.engine_options import EngineConfig
from jaxspec.plan.plan import BLOCK_COPIES, EXPORT, MOVES, RESTORE, TABLES, Program, plan_layout
from jaxspec.plan.step_shapes import SchedulerLimits
from jaxspec.proposers import PROPOSERS
from jaxspec.proposers.testing.oracle import OracleProposer
from jaxspec.requests.sampling_features import GREEDY, REPORTS, SAMPLED, SamplingFeatures
from jaxspec.runner.batch_state import EngineState
from jaxspec.runner.blocks import BlockCopies
from jaxspec.runner.step import StepConfig, make_step
from jaxspec.runner.warmup import programs
from jaxspec.sampling import make_verifier
from jaxspec.sampling.processors import PROCESSORS

VOCABULARIES = 32_000, 49_152, 65_536, 128_256, 131_072, 151_936, 248_320, 50_257, 2_049
EVERYTHING = SamplingFeatures.of(*PROCESSORS, *REPORTS)
BFLOAT16 = jnp.dtype("bfloat16")
PROMPT = 64  # tokens


class Engine(NamedTuple):
    """All that a step is made of, as shapes."""

    config: StepConfig
    limits: SchedulerLimits
    weights: list
    tables: tuple
    state: EngineState

    def trace(self, program):
        packed = jax.ShapeDtypeStruct((plan_layout(program, self.config.shapes).size,), jnp.int32)
        state = self.state.of(program)
        step = make_step(self.config, program)
        after, output = jax.eval_shape(step, self.weights, self.tables, state, packed)
        assert after == state, "a program keeps the shapes of its state: it is donated"
        return output


@pytest.fixture
def engine_of(tmp_path):
    """An engine of a fixture's configuration with other fields; no weight is drawn."""

    def build(fixture, drafter=None, fields=(), **options):
        published = json.loads((FIXTURES / fixture / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps(published | dict(fields)))
        with unread(tmp_path, BFLOAT16, load_format="dummy") as found:
            model = found.model
        if drafter is not None:
            with unread_model_or_head(FIXTURES / drafter, BFLOAT16, load_format="dummy") as found:
                drafter = found.model
        given = {"max_num_seqs": 4, "max_model_len": 512, "num_pages": 129, **options}
        settled = settle(EngineConfig(**given), model, BFLOAT16, drafter)
        shapes = dataclasses.replace(settled.shapes, num_checkpoints=2)
        graph, weights = nnx.split(model)
        leaves, tree = jax.tree.flatten(weights)
        config = StepConfig(
            shapes=shapes,
            model=graph,
            weights=tree,
            proposer=settled.proposer,
            verifier=make_verifier(settled.speculation),
            specs=settled.memory_usage.specs,
            states=state_policy(settled.states),
        )
        state = jax.eval_shape(functools.partial(settled.memory_usage.empty_state, shapes))
        return Engine(config, settled.limits, leaves, settled.memory_usage.tables, state)

    return build


def check_rows(output, rows, prompts, width):
    """The output has a row for each row that decodes and each chunk, and reports on all."""
    steps = output.packed.shape[0]
    assert output.packed.shape[:2] == (steps, rows + prompts)
    if output.logprobs is not None:
        assert output.logprobs.shape[:3] == (steps, rows + prompts, width)


@pytest.mark.few(2)
@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_steps_trace_at_published_vocabularies(engine_of, vocab):
    """With every feature of sampling: rows alone, a prompt beside rows, and prompts alone."""
    engine = engine_of("llama", fields={"vocab_size": vocab, "num_hidden_layers": 1})
    for rows, tokens in ((4, 0), (4, PROMPT), (0, PROMPT)):
        output = engine.trace(Program(rows, tokens, EVERYTHING))
        check_rows(output, rows, engine.config.shapes.prefill_seqs(tokens), 1)


@pytest.mark.soak
def test_every_program_of_an_engine_traces(engine_of):
    """Those that are compiled, several steps at once, copies and tables among them."""
    drawn = {"draft_sample_method": "probabilistic", "rejection_sample_method": "block"}
    engine = engine_of(
        "qwen3_5",
        fields={"vocab_size": 248_320},
        speculative_config={"method": "mtp", "num_speculative_tokens": 3, **drawn},
        steps_per_dispatch=2,
        mamba_cache_mode="all",
        kv_offloading_size=0.001,
    )
    shapes = engine.config.shapes
    found = programs(shapes, engine.limits, [EVERYTHING])
    assert {TABLES, EXPORT, RESTORE, *BLOCK_COPIES} <= set(found)
    pieces = BlockCopies(engine.config.specs, shapes)
    for program in {**dict.fromkeys(found), MOVES: None}:
        if program in BLOCK_COPIES:
            pieces.lower(program, engine.state)
        else:
            engine.trace(program)


METHODS = {  # of drafting: the target's fixture, the drafter's and the options
    "mtp": ("qwen3_5", None, {"method": "mtp", "synthetic_acceptance_rates": [0.8, 0.5]}),
    "mtp of few ids": ("qwen3_5_moe", None, {"method": "mtp", "draft_vocab": 128}),
    "rejection": ("nemotron_h", None, {"method": "mtp", "draft_sample_method": "probabilistic"}),
    "ngram": ("lfm2", None, {"method": "ngram"}),
    "suffix": ("mamba2", None, {"method": "suffix"}),
    "draft_model": ("llama", "llama_draft", {"method": "draft_model", "model": "llama_draft"}),
    "eagle3": ("llama", "llama_eagle3", {"method": "eagle3", "model": "llama_eagle3"}),
    "assistant": (
        "gemma4_shared",
        "gemma4_assistant",
        {"method": "assistant", "model": "gemma4_assistant"},
    ),
    "extract_hidden_states": (
        "qwen3",
        None,
        {"method": "extract_hidden_states", "layers": [0, 1], "folder": "states"},
    ),
    "custom": (
        "qwen3",
        None,
        {"method": "custom", "proposer": OracleProposer(2, 264, sequences=((1, 2, 3),))},
    ),
}


def test_every_method_is_in_the_table():
    assert PROPOSERS.keys() == {options["method"] for _, _, options in METHODS.values()}


@pytest.mark.few(1)
@pytest.mark.parametrize("name", METHODS)
def test_steps_of_every_method_trace(engine_of, name):
    fixture, drafter, options = METHODS[name]
    if options["method"] != "extract_hidden_states":
        options = {"num_speculative_tokens": 2, **options}
    engine = engine_of(fixture, drafter, speculative_config=options)
    drafts = engine.config.shapes.num_drafts
    for rows, tokens, features in ((1, 0, GREEDY), (0, PROMPT, SAMPLED)):
        output = engine.trace(Program(rows, tokens, features, num_drafts=drafts))
        check_rows(output, rows, engine.config.shapes.prefill_seqs(tokens), 1 + drafts)


FAMILIES = (
    *("qwen3_5", "qwen3_next", "falcon_h1", "granitemoehybrid", "lfm2", "mamba2"),
    *("nemotron_h_latent", "deepseek_v32", "kimi_linear", "gpt_oss", "gemma4_moe"),
    "gemma4_shared",
)


@pytest.mark.few(2)
@pytest.mark.parametrize("policy", ["snapshot", "replay"])
@pytest.mark.parametrize("fixture", FAMILIES)
def test_prompts_alone_trace_in_every_mixer(engine_of, fixture, policy):
    """The decode rectangle has no rows."""
    engine = engine_of(fixture, state_policy=policy, speculative_config=None)
    check_rows(engine.trace(Program(0, PROMPT, GREEDY)), 0, 4, 1)


def test_every_mixer_and_feed_forward_layer_is_traced():
    kinds = set()
    for fixture in FAMILIES:
        fields = json.loads((FIXTURES / fixture / "config.json").read_text())
        config = parse_config(fields)
        kinds |= {*config.layer_types, *config.feed_forward_types}
    assert kinds >= {*MIXERS, *FEED_FORWARDS} - {READ_SLIDING}  # of a drafter alone
