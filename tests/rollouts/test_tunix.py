"""tunix's own cluster and GRPO learner with an engine: `pip install -e .[test,rollouts]`."""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from installed import needs

import jaxspec

pytestmark = [
    pytest.mark.clients,
    needs("tunix"),
    pytest.mark.filterwarnings("ignore"),  # tunix calls deprecated functions of JAX
]
PROMPTS = ["def add(a, b):\n", "import os"]
SAMPLES, NEW, PAD = 2, 8, 2047
TUNIXS = {"jax_numpy_dtype_promotion": "standard", "jax_numpy_rank_promotion": "allow"}
CONFIG = {
    "max_tokens_to_generate": NEW,
    "max_prompt_length": 15,
    "kv_cache_size": 64,
    "temperature": 0.7,
    "return_logprobs": True,
}


class Tokenizer:
    """The engine's tokenizer with tunix's five methods."""

    def __init__(self, tokenizer, pad=PAD):
        self._tokenizer, self._pad = tokenizer, pad

    def encode(self, text, **_):
        return self._tokenizer.encode(text)

    def decode(self, ids, **_):
        return self._tokenizer.decode([int(token) for token in ids])

    def bos_id(self):
        return None

    def eos_id(self):
        return self._tokenizer.eos_token_id

    def pad_id(self):
        return self._pad


@pytest.fixture(scope="module", autouse=True)
def promotion():
    """tunix subtracts a bool from an integer, which the suite forbids, also in threads."""
    before = {name: getattr(jax.config, name) for name in TUNIXS}
    for name in TUNIXS:
        jax.config.update(name, TUNIXS[name])
    yield
    for name, value in before.items():
        jax.config.update(name, value)


@pytest.fixture(scope="module")
def llm():
    with jaxspec.LLM(
        dtype="float32",
        max_num_seqs=4,
        decode_buckets=[4],
        prefill_buckets=[32],
        max_model_len=64,
        background_compilation=False,
        show_progress=False,
    ) as llm:
        yield llm


@pytest.fixture(scope="module")
def cluster(llm):
    import optax
    from tunix.rl import rl_cluster
    from tunix.rl.rollout.base_rollout import RolloutConfig

    from jaxspec.rollouts.tunix import JaxspecActor, JaxspecRollout

    auto = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh((1, 1), ("fsdp", "tp"), axis_types=auto, devices=jax.devices()[:1])
    role = rl_cluster.Role
    return rl_cluster.RLCluster(
        actor=JaxspecActor(llm),
        tokenizer=Tokenizer(llm.tokenizer),
        cluster_config=rl_cluster.ClusterConfig(
            role_to_mesh=dict.fromkeys((role.ACTOR, role.REFERENCE, role.ROLLOUT), mesh),
            rollout_engine=functools.partial(JaxspecRollout, llm=llm),
            offload_to_cpu=False,
            training_config=rl_cluster.RLTrainingConfig(
                actor_optimizer=optax.adam(1e-3),
                eval_every_n_steps=1000,
                max_steps=3,
                mini_batch_size=len(PROMPTS),
                train_micro_batch_size=len(PROMPTS),
            ),
            rollout_config=RolloutConfig(**CONFIG),
        ),
    )


def repeated():
    return [prompt for prompt in PROMPTS for _ in range(SAMPLES)]


def actors(cluster, output):
    """Log-probabilities of generated tokens by the trainer's model and tunix's own code."""
    from tunix.rl import common

    completions = np.full((len(output.tokens), NEW), PAD, np.int32)
    for row, ids in zip(completions, output.tokens, strict=True):
        row[: len(ids)] = ids
    graph, state = nnx.split(cluster.actor_trainer.model)
    found = common.compute_per_token_logps(
        graph,
        state,
        jnp.asarray(output.left_padded_prompt_tokens),
        jnp.asarray(completions),
        PAD,
        cluster.tokenizer.eos_id(),
        temperature=CONFIG["temperature"],
    )
    return np.asarray(found), completions


def assert_same_logprobs(cluster, output):
    by_actor, completions = actors(cluster, output)
    by_score = cluster.rollout.get_per_token_logps(output.left_padded_prompt_tokens, completions)
    for row, scored, own in zip(by_actor, np.asarray(by_score), output.logprobs, strict=True):
        np.testing.assert_allclose(row[: len(own)], own, atol=1e-4)
        np.testing.assert_allclose(scored[: len(own)], own, atol=1e-4)
        assert not scored[len(own) :].any()


def test_samples_have_tunix_form_and_the_trainers_logprobs(cluster, llm):
    output = cluster.generate(repeated())
    ids = [llm.tokenizer.encode(prompt) for prompt in repeated()]
    for text, tokens, padded, prompt in zip(
        output.text, output.tokens, output.left_padded_prompt_tokens, ids, strict=True
    ):
        assert 0 < len(tokens) <= NEW
        assert llm.tokenizer.decode(tokens.tolist()).startswith(text)
        assert padded.tolist() == [PAD] * (CONFIG["max_prompt_length"] - len(prompt)) + prompt
    assert_same_logprobs(cluster, output)


def test_seeds_repeat_no_sample_of_a_call(llm, cluster):
    from tunix.rl.rollout.base_rollout import RolloutConfig

    config = RolloutConfig(**CONFIG | {"temperature": 2.0, "seed": jax.random.key(3)})
    once, again = (cluster.rollout.generate(repeated(), config) for _ in range(2))
    texts = [tuple(tokens) for output in (once, again) for tokens in output.tokens]
    assert len(set(texts)) == len(texts)


def test_the_engine_has_the_weights_of_each_update(cluster, llm):
    from tunix.rl.grpo import grpo_learner

    rewards = []

    def reward(prompts, completions, **_):
        rewards.append([float(len(text)) for text in completions])
        return rewards[-1]

    before = llm.export_weights()
    versions = int(llm.weight_version)
    learner = grpo_learner.GRPOLearner(
        rl_cluster=cluster,
        algo_config=grpo_learner.GRPOConfig(num_generations=SAMPLES, num_iterations=1, beta=0.0),
        reward_fns=reward,
    )
    learner.train([{"prompts": np.array(PROMPTS)}] * 3)
    assert len(rewards) == 3
    assert int(llm.weight_version) - versions >= 2
    changed = [name for name, x in llm.export_weights().items() if (x != before[name]).any()]
    assert any("layers" in name for name in changed)
    cluster.sync_weights()
    assert_same_logprobs(cluster, cluster.generate(repeated()))


def test_padding_that_ends_samples_and_adapters_are_refused(cluster, llm):
    from jaxspec.rollouts.tunix import JaxspecActor, JaxspecRollout

    tokenizer = Tokenizer(llm.tokenizer, pad=llm.tokenizer.eos_token_id)
    with pytest.raises(ValueError, match="pad_id"):
        JaxspecRollout(
            llm=llm,
            rollout_actor=JaxspecActor(llm),
            tokenizer=tokenizer,
            rollout_config=types.SimpleNamespace(eos_tokens=None),
        )
    with pytest.raises(ValueError, match="LoRA"):
        cluster.rollout.update_params(nnx.State({}), (nnx.LoRAParam,))
