"""marin's environment and levanter's model with an engine: `pip install -e .[test,marin]`."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import FIXTURES
from installed import needs
from tokenizer_folders import with_bytes

import jaxspec

pytestmark = [
    pytest.mark.clients,
    needs("marin"),
    pytest.mark.filterwarnings("ignore"),
]
OPTIONS = {"dtype": "float32", "max_num_seqs": 4, "decode_buckets": [4], "prefill_buckets": [64]}
OPTIONS |= {"max_model_len": 96, "show_progress": False}
LEVANTERS = {"jax_numpy_dtype_promotion": "standard", "jax_numpy_rank_promotion": "allow"}
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "


@pytest.fixture(scope="module", autouse=True)
def promotion():
    before = {name: getattr(jax.config, name) for name in LEVANTERS}
    for name in LEVANTERS:
        jax.config.update(name, LEVANTERS[name])
    yield
    for name in before:
        jax.config.update(name, before[name])


@pytest.fixture(scope="module")
def policy():
    """levanter's model of the fixture's sizes, with random weights."""
    import haliax
    import transformers
    from levanter.models.qwen import Qwen3Config

    fields = json.loads((FIXTURES / "qwen3" / "config.json").read_text())
    fields["rope_theta"] = fields.pop("rope_parameters")["rope_theta"]
    config = Qwen3Config.from_hf_config(transformers.Qwen3Config(**fields))
    vocabulary = haliax.Axis("vocab", fields["vocab_size"])
    return config.build(vocabulary, key=jax.random.PRNGKey(0))


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    folder = with_bytes("qwen3", tmp_path_factory.mktemp("bytes"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    with jaxspec.LLM(folder, **OPTIONS) as llm:
        yield llm


class Tokenizer:
    """The engine's tokenizer with the method that marin calls."""

    def __init__(self, tokenizer):
        self._tokenizer = tokenizer

    def decode(self, ids):
        return self._tokenizer.decode([int(token) for token in ids])


@pytest.fixture(scope="module")
def context(llm, policy):
    from jaxspec.rollouts.marin import JaxspecInferenceContext

    made = JaxspecInferenceContext(llm=llm, tokenizer=Tokenizer(llm.tokenizer))
    made.start_server(policy)
    return made


def levanters(policy, tokens, temperature):
    """Log-probabilities of the tokens after the first, by levanter's model."""
    import haliax
    from levanter.layers.attention import AttentionMask

    position = haliax.Axis("position", len(tokens))
    ids = haliax.named(jnp.asarray(tokens, jnp.int32), position)
    logits = policy(ids, attn_mask=AttentionMask.causal(), key=None).array / temperature
    scores = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
    return np.asarray(scores)[np.arange(len(tokens) - 1), tokens[1:]]


def check(context, policy, decoding, **options):
    (completion,) = context.batch_completions(["What is 2 + 2?"], 2, decoding, **options)
    assert len(completion.choices) == 2
    for choice in completion.choices:
        prompt = context.tokenize_prompt("", choice)
        response = context.response_tokens_from_choice(choice)
        found = context.logprobs_from_choice(choice)
        tokens = np.concatenate([prompt, response])
        want = levanters(policy, tokens, decoding.temperature)[len(prompt) - 1 :]
        np.testing.assert_allclose(found, want, rtol=0, atol=1e-4)
        assert choice.message.content == context.tokenizer.decode(response)
    assert completion.usage.prompt_tokens == len(prompt)
    return prompt


def test_logprobs_are_those_of_the_trainer_s_model(context, policy):
    """With temperature, before and after an update by the arrays that marin transfers."""
    from marin.rl.decoding import DecodingConfig

    decoding = DecodingConfig(temperature=0.7, max_output_tokens=12, seed=3, ignore_eos=True)
    check(context, policy, decoding)
    other = jax.tree.map(lambda leaf: leaf * 1.1 if leaf.ndim > 1 else leaf, policy)
    sent = {name: np.asarray(each) for name, each in other.to_state_dict().items()}
    assert context.reload_model(None, sent) is None
    prompt = check(context, other, decoding, system_prompt="Be brief.")
    assert "system: Be brief." in context.tokenizer.decode(prompt)
    assert context.reload_model(policy, {}) is policy
    check(context, policy, decoding)
    assert context.get_metrics()["jaxspec/num_tokens"] > 0


def test_an_environment_of_marin_makes_rollouts(context):
    from marin.rl.decoding import DecodingConfig
    from marin.rl.environments.mock_env import MockEnv

    decoding = DecodingConfig(temperature=1.0, top_k=20, max_output_tokens=8, seed=1)
    groups, _ = MockEnv("opposites", seed=0).sample(
        context, 2, 3, decoding, jax.random.PRNGKey(0), mode="train"
    )
    assert groups and all(len(group.rollouts) == 3 for group in groups)
    for rollout in (each for group in groups for each in group.rollouts):
        assert len(rollout.response_tokens) == len(rollout.response_logprobs) > 0
        assert (rollout.response_logprobs <= 0).all()
        assert rollout.decoding.top_k == 20


def test_greedy_decoding_repeats_itself(context):
    from marin.rl.decoding import DecodingConfig, DecodingStrategy

    decoding = DecodingConfig(DecodingStrategy.GREEDY, temperature=0.0, max_output_tokens=8)
    chats = [[{"role": "user", "content": "Hello"}]] * 2
    first, again = context.batch_completions(chats, 1, decoding)
    tokens = [context.response_tokens_from_choice(each.choices[0]) for each in (first, again)]
    np.testing.assert_array_equal(*tokens)


def test_a_transposed_matrix_is_refused(context, policy):
    """It has as many elements as the engine's, and its axes are in another order."""
    sent = {name: np.asarray(each) for name, each in policy.to_state_dict().items()}
    name = "model.layers.0.mlp.up_proj.weight"
    assert sent[name].ndim == 2 and sent[name].shape != sent[name].T.shape
    with pytest.raises(ValueError, match=name):
        context.reload_model(None, sent | {name: sent[name].T})


def test_weights_must_be_given(context):
    with pytest.raises(ValueError):
        context.reload_model(None, {})
