"""Keys: two programs have two, whatever they differ in, and the same one has the same."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import FIXTURES, REPLAY, Harness

from jaxspec.options.draft_methods import DraftModelOptions, Eagle3Options, MTPOptions
from jaxspec.plan.plan import Program
from jaxspec.requests.sampling_features import GREEDY, SAMPLED
from jaxspec.runner.programs import program_key

FIRST = Program(4, 0, GREEDY)


def test_a_fingerprint_tells_programs_apart_wherever_they_run():
    args = {"x": jnp.arange(4)}, np.int32(2)
    same = program_key.fingerprint(args, "add")
    assert same == program_key.fingerprint(jax.tree.map(program_key.described, args), "add")
    others = [
        program_key.fingerprint(args, "multiply"),
        program_key.fingerprint(({"x": jnp.arange(5)}, np.int32(2)), "add"),
        program_key.fingerprint(({"y": jnp.arange(4)}, np.int32(2)), "add"),
        program_key.fingerprint(({"x": jnp.arange(4.0)}, np.int32(2)), "add"),
    ]
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((1,), ("rows",))):
        others.append(program_key.fingerprint(args, "add"))
    assert len({same, *others}) == 6
    assert program_key.fingerprint(args, object()) is None


@pytest.mark.soak
def test_every_family_has_words_for_its_programs():
    """Without them its programs would be traced one by one at every start."""
    for fixture in {path.parent.name for path in FIXTURES.glob("*/model*.safetensors")}:
        if not fixture.endswith(("_draft", "_eagle3", "_assistant")):
            assert Harness(fixture, feature_sets=()).runner._blueprint.fingerprint(FIRST), fixture


def key(fixture="qwen3_5", program=FIRST, **options):
    engine = Harness(fixture, feature_sets=(), **{"drafts": 1, "accuracy": None, **options})
    runner = engine.runner
    packed = runner._empty_plan(program)
    args = runner._weights, runner._tables, runner._state, packed
    return program_key.key(args, (runner._config, program))


OTHER = [
    {"fixture": "qwen3"},
    {"fixture": "qwen3_5_tied"},
    {"drafts": 0},
    {"drafts": 2},
    {"accuracy": (0.5,), "continuations": [(1, 2)]},
    {"accuracy": (0.5,), "continuations": [(1, 2)], "vary": True},
    {"probabilistic": True},
    {"options": MTPOptions(tuple(range(64)))},
    {"options": MTPOptions(draft_head_dtype="float8_e4m3fn")},
    {"method": "ngram"},
    {"method": "draft_model", "drafter": "llama", "options": DraftModelOptions("a")},
    {"method": "eagle3", "drafter": "llama_eagle3", "options": Eagle3Options("a")},
    {
        "method": "eagle3",
        "drafter": "llama_eagle3",
        "options": Eagle3Options("a", aux_layer_ids=(0, 1, 2)),
    },
    {"probabilistic": True, "rejection": "block"},
    {"synthetic": (0.5,)},
    {"synthetic": (0.75,)},
    {"page_size": 8},
    {"num_pages": 800},
    {"states": REPLAY},
    {"kv_dtype": jnp.dtype("bfloat16")},
    {"decode_rows": (2, 4)},
    {"program": dataclasses.replace(FIRST, num_steps=2)},
    {"program": dataclasses.replace(FIRST, num_drafts=1)},
    {"program": dataclasses.replace(FIRST, features=SAMPLED)},
]


@pytest.mark.soak
def test_another_program_has_another_key(monkeypatch):
    keys = [key(**other) for other in ({}, *OTHER)]
    for name, value in {"SOURCES": "edited", "_VERSIONS": {"jax": "0.0.1"}}.items():
        with monkeypatch.context() as patch:
            patch.setattr(program_key, name, value)
            keys.append(key())
    with jax.default_matmul_precision("bfloat16"):
        keys.append(key())
    assert None not in keys and len(set(keys)) == len(keys)
    assert key() == keys[0] == key(chunk=7, max_in_flight=1)  # what no program depends on
