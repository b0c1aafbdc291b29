"""An EAGLE-3 head against its reference, in every published variant, and what is refused."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from eagle3_oracle import Eagle3Oracle
from harness import oracle
from safetensors.numpy import load_file, save_file

from jaxspec.models import load_model, unread_model_or_head
from jaxspec.models.eagle3 import Eagle3Config, Eagle3Head
from jaxspec.models.fields import Fields

FIXTURE = "llama_eagle3"
RANDOM = np.random.default_rng(0)


def load(folder, **options):
    with unread_model_or_head(folder, jnp.float32, **options) as found:
        return found.read()


def run(head, driver, embedded, hidden, *, prefill):
    """Scores of the draft vocabulary and states after a pass of one request's tokens."""
    inputs, place = driver._inputs(0, len(hidden), prefill=prefill)
    operands = [np.zeros((len(inputs.tokens), len(hidden[0])), np.float32) for _ in range(2)]
    operands[0][place], operands[1][place] = embedded, hidden
    output, driver.pools = jax.jit(type(head).__call__)(head, *operands, inputs, driver.pools)
    driver.num_computed += len(hidden)
    return np.asarray(head.lm_head(output.scored))[place], np.asarray(output.state)[place]


def test_loaded_weights_reproduce_the_reference(fixture_folder, reference, single_request):
    head, target = load(fixture_folder(FIXTURE)), load_model(fixture_folder("llama"), jnp.float32)
    expected, trunk = reference(FIXTURE), reference("llama")
    ids = np.concatenate([trunk["prompt_ids"], trunk["greedy_ids"]])
    aux = np.concatenate([trunk["hidden_layers"][layer] for layer in (2, 3, 3)], axis=1)
    features = head.features(jnp.asarray(aux))
    np.testing.assert_allclose(features, expected["eagle_features"], rtol=0, atol=2e-4)
    embedded, driver = target.embed(ids[1:]), single_request(head)
    for at in (0, 33, 66):  # in chunks
        part = slice(at, min(at + 33, 93))
        scores, states = run(head, driver, embedded[part], features[:-1][part], prefill=True)
        np.testing.assert_allclose(scores, expected["logits_tf"][part], rtol=0, atol=5e-4)
        np.testing.assert_allclose(states, expected["hidden_tf"][part], rtol=0, atol=5e-4)


@pytest.fixture
def copied(tmp_path, fixture_folder):
    """A copy of the fixture with other fields of config.json and other tensors; None takes away."""

    def copy(tensors=None, **changes):
        folder = shutil.copytree(fixture_folder(FIXTURE), tmp_path / "head")
        config = json.loads((folder / "config.json").read_text()) | changes
        config = {name: value for name, value in config.items() if value is not None}
        (folder / "config.json").write_text(json.dumps(config))
        held = load_file(folder / "model.safetensors") | (tensors or {})
        held = {name: value for name, value in held.items() if value is not None}
        save_file(held, folder / "model.safetensors")
        return folder

    return copy


def norm(size):
    return (1 + 0.2 * RANDOM.normal(size=size)).astype(np.float32)


def matrix(*shape):
    return RANDOM.normal(size=shape).astype(np.float32) / 8


LAYER = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 264,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512,
    "rope_theta": 10000.0,
    "num_hidden_layers": 1,
    "model_type": "llama",
}
SPECULATOR = {
    **dict.fromkeys([*LAYER, "tie_word_embeddings"]),
    "architectures": ["Eagle3Speculator"],
    "transformer_layer_config": LAYER,
}
VARIANTS = {
    "as it is": ({}, {}),
    "norm before residual": ({}, {"norm_before_residual": True}),
    "norm of the output": ({}, {"norm_output": True}),
    "norm before fc": ({"input_norm.weight": norm(192)}, {"norm_before_fc": True}),
    "a norm of each": ({f"fc_norm.{i}.weight": norm(64) for i in range(3)}, {}),
    "own embeddings": ({"embed_tokens.weight": matrix(264, 64)}, {}),
    "the whole vocabulary": (
        {"lm_head.weight": matrix(264, 64), "d2t": None, "t2d": None},
        {"draft_vocab_size": None},
    ),
    "a speculator": ({}, SPECULATOR),
    "a speculator without the norm": ({}, SPECULATOR | {"norm_before_residual": False}),
    "another name": ({}, {"architectures": ["Eagle3Qwen3ForCausalLM"]}),
}


@pytest.mark.soak
@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant_is_what_its_formula_says(name, copied, fixture_folder, single_request):
    folder, tokens = copied(*VARIANTS[name][:1], **VARIANTS[name][1]), [5, 200, 17, 17, 90, 3]
    numpy, head = Eagle3Oracle(folder, oracle("llama")), load(folder)
    np.testing.assert_array_equal(np.arange(264) if head.ids is None else head.ids, numpy.ids)
    target, expected, aux, embedded = oracle("llama").start(), numpy.start(), [], []
    embedding = numpy.embedding if head.embedding is None else head.embedding.weight[...]
    scores, states = [], []
    for token, following in zip(tokens[:-1], tokens[1:], strict=True):
        target.feed(token)
        aux.append(np.concatenate([target.streams[layer] for layer in (2, 3, 3)]))
        embedded.append(embedding[following])
        expected.feed(following, numpy.features(target.streams))
        scores.append(expected.scores)
        states.append(expected.state)
    driver = single_request(head)
    features = head.features(jnp.asarray(np.stack(aux), jnp.float32))
    got, state = run(head, driver, embedded, features, prefill=True)
    np.testing.assert_allclose(got, scores, rtol=0, atol=2e-4)
    np.testing.assert_allclose(state, states, rtol=0, atol=2e-4)
    for token in (40, 8):  # passes on their own state
        expected.feed(token, expected.state)
        got, state = run(head, driver, [embedding[token]], state[-1:], prefill=False)
        np.testing.assert_allclose(got[0], expected.scores, rtol=0, atol=2e-4)


def test_the_fields_may_stand_in_either_place():
    ids = {"eagle_aux_hidden_state_layer_ids": [1, 2, 3, 4]}
    published = {"architectures": ["LlamaForCausalLMEagle3"], **LAYER}
    plain = Eagle3Head.parse_config(Fields(published))
    assert plain.part(Eagle3Config).aux_layer_ids is None and plain.part(Eagle3Config).num_aux == 3
    assert plain.rope.theta == 1e4 and plain.attention_inputs == 128 and not plain.normed_heads
    for given in (ids, {"eagle_config": ids | {"use_aux_hidden_state": True}}):
        own = Eagle3Head.parse_config(Fields(published | given)).part(Eagle3Config)
        assert own.aux_layer_ids == (1, 2, 3, 4) and own.num_aux == 4
    empty = published | {"eagle_config": {"eagle_aux_hidden_state_layer_ids": []}}
    assert Eagle3Head.parse_config(Fields(empty)) == plain


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 2}, "`num_hidden_layers` must be an integer from 1 to 1, got 2"),
        ({"draft_vocab_size": 999}, "`draft_vocab_size` must be an integer from 1 to 264"),
        ({"logit_scale": 0.5}, "`logit_scale` must be 1"),
        ({"attention_bias": True}, "`attention_bias` must be False"),
        ({"norm_before_residual": 1}, "`norm_before_residual` must be true or false"),
        ({"target_hidden_size": "x"}, "`target_hidden_size` must be an integer"),
        ({"eagle_aux_hidden_state_layer_ids": [-1]}, "must be a list of at most 16, each"),
        (
            {"eagle_config": {"use_aux_hidden_state": False}},
            "`eagle_config.use_aux_hidden_state` must be True",
        ),
        ({"draft_vocab_size": 64}, r"Wrong shape \(2\): d2t \[128\] instead of \[64\], lm_head"),
        ({"norm_before_fc": True}, r"Missing \(1\): input_norm.weight"),
        ({"fc_norm": True}, r"Missing \(3\): fc_norm.0.weight"),
        ({"hidden_size": 32, "target_hidden_size": 64}, r"Missing \(1\): embed_tokens.weight"),
    ],
)
def test_a_config_that_does_not_fit_is_refused(changes, message, copied):
    with pytest.raises(ValueError, match=message):
        load(copied(**changes))


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"midlayer.hidden_norm.weight": None}, r"Missing \(1\): midlayer.hidden_norm.weight"),
        ({"d2t": None}, r"Missing \(1\): d2t"),
        ({"midlayer.self_attn.q_norm.weight": norm(32)}, r"Unexpected \(1\): midlayer.self_attn.q"),
        ({"d2t": np.zeros(128, np.float32)}, r"must be one of I64, I32 \(1\): d2t F32"),
        ({"norm.weight": np.ones(64, np.int32)}, r"F32, BF16, F16 \(1\): norm.weight I32"),
        ({"d2t": np.arange(128) * -1}, "ascending ids .* It makes 0 of 1. .* offsets, not ids"),
        ({"d2t": np.full(128, 200)}, "ids of the target, 0 to 263: .* It makes 264 of 64"),
        ({"d2t": np.full(128, -5)}, "It makes -5 of 0"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(tensors, message, copied):
    with pytest.raises(ValueError, match=message):
        load(copied(tensors))


def test_offsets_may_be_of_32_bits(copied, fixture_folder):
    offsets = load_file(fixture_folder(FIXTURE) / "model.safetensors")["d2t"]
    head = load(copied({"d2t": offsets.astype(np.int32)}))
    np.testing.assert_array_equal(head.offsets, offsets)


def test_a_head_is_drawn_without_its_tensors(fixture_folder):
    head = load(fixture_folder(FIXTURE), load_format="dummy")
    np.testing.assert_array_equal(head.ids, np.arange(128))
    assert head.embedding is None and float(jnp.std(head.fc.weight.array[...])) > 0


def test_a_head_is_no_model(fixture_folder):
    with pytest.raises(ValueError, match="a head that drafts for a model .* Load the model"):
        load_model(fixture_folder(FIXTURE), jnp.float32)
