"""The differentiable forward of every family: its values, its gradient, and what has none.

Values are compared with the logits of another implementation, gradients with central differences.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import HYBRID, folder_of, model
from pairwise import soak
from safetensors.numpy import load_file

import jaxspec
from jaxspec.pallas import dispatch

WITH_HEADS = [HYBRID, "qwen3_5", "qwen3_next", "nemotron_h_latent", "deepseek_v3", "deepseek_v32"]
WITH_HEADS += ["glm4_moe"]
WITH_VALUES = ["qwen3_5", "nemotron_h_latent", "qwen3_moe", "falcon_h1", "lfm2"]
WITH_VALUES += ["qwen3_next", "mamba2", "granitemoehybrid", "llama", "qwen2"]
WITH_VALUES += ["deepseek_v3", "deepseek_v32", "kimi_linear", "glm4_moe", "gemma4_shared"]
UNTIED = [HYBRID, "qwen3_5", "qwen3_moe", "nemotron_h_latent"]
# What only chooses: the correction of experts' scores, and the index of tokens.
NOT_TRAINED = ["correction", "['indexer']"]
LENGTHS = np.array([80, 9])  # the first text spans two chunks of 64
PADDED = 83
INEXACT = {"kimi_linear": 1e-4}  # the reference is up to 9e-5 off float64
STEPS = [3e-4, 1e-4, 4e-5]  # of central differences, in standard deviations of each parameter


@dataclasses.dataclass
class Run:
    """The logprobs of two texts by a family, and the gradient of their weighted sum."""

    name: str
    params: Any
    tokens: np.ndarray
    program: Any
    weights: np.ndarray

    def __call__(self, params=None, tokens=None, trunk=1.0, drafts=0.0):
        """(logprobs, those of the draft head if there is one), and the gradient."""
        texts = self.tokens if tokens is None else tokens
        weights = self.weights * np.float32(trunk), self.weights[:, 1:] * np.float32(drafts)
        (_, found), gradient = self.program(params or self.params, texts, *weights)
        return found, gradient

    def loss(self, params):
        """The sum in float64."""
        return float((np.asarray(self(params)[0][0], np.float64) * self.weights).sum())


@functools.cache
def run_of(name):
    made = jaxspec.differentiable(model(name))
    ids = ids_of(name)
    tokens = np.full((2, PADDED), 10**6, np.int32)
    tokens[0, : LENGTHS[0]], tokens[1, : LENGTHS[1]] = ids[: LENGTHS[0]], ids[5 : 5 + LENGTHS[1]]

    @jax.jit
    def program(params, tokens, weights, draft_weights):
        def loss(params):
            found = [made.logprobs(params, tokens, LENGTHS)]
            total = jnp.sum(found[0] * weights)
            if name in WITH_HEADS:
                found.append(made.draft_logprobs(params, tokens, LENGTHS))
                total += jnp.sum(found[1] * draft_weights)
            return total, found

        return jax.value_and_grad(loss, has_aux=True)(params)

    weights = np.random.default_rng(0).normal(size=(2, PADDED - 1)).astype(np.float32)
    return Run(name, made.params, tokens, program, weights)


@functools.cache
def reference(name):
    return load_file(folder_of(name) / "reference.safetensors")


def ids_of(name):
    return np.concatenate([reference(name)["prompt_ids"], reference(name)["greedy_ids"]])


@pytest.fixture(params=[HYBRID, *map(soak, WITH_VALUES)])
def run(request):
    return run_of(request.param)


def log_softmax(logits):
    logits = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def by_path(gradient):
    flat, _ = jax.tree.flatten_with_path(gradient)
    return {jax.tree_util.keystr(path): np.asarray(values) for path, values in flat}


@pytest.mark.soak
@pytest.mark.parametrize("run", WITH_VALUES, indirect=True)
def test_values_are_those_of_another_implementation(run):
    found, _ = run()
    logits = [reference(run.name)["logits_full"]]
    logits += [reference(run.name)["mtp_logits_tf"]] if run.name in WITH_HEADS else []
    for ahead, (logprobs, each) in enumerate(zip(found, logits, strict=True), 1):
        count, targets = LENGTHS[0] - ahead, ids_of(run.name)[ahead : LENGTHS[0]]
        want = log_softmax(each)[np.arange(count), targets]
        error = INEXACT.get(run.name, 5e-5)
        np.testing.assert_allclose(logprobs[0, :count], want, rtol=0, atol=error)


def test_padding_adds_nothing(run):
    found, gradient = run()
    for ahead, logprobs in enumerate(found, 1):
        for text, length in zip(np.asarray(logprobs), LENGTHS, strict=True):
            assert not text[length - ahead :].any() and text[: length - ahead].all()
    for pad in (-1, 0):
        is_padding = np.arange(PADDED) >= LENGTHS[:, None]
        again = run(tokens=np.where(is_padding, pad, run.tokens).astype(np.int32))
        jax.tree.map(np.testing.assert_array_equal, (found, gradient), again)


def test_every_parameter_has_a_finite_gradient_from_the_loss_that_it_changes(run):
    """Logprobs reach all but the draft head, and the head's reach no other."""
    of_trunk = by_path(run()[1])
    of_drafts = by_path(run(trunk=0.0, drafts=1.0)[1])
    for path, values in of_trunk.items():
        assert np.isfinite(values).all() and np.isfinite(of_drafts[path]).all(), path
        is_head = "draft_head" in path
        has_any = not any(name in path for name in NOT_TRAINED)
        assert values.any() == (has_any and not is_head), path
        assert of_drafts[path].any() == (has_any and is_head), path


@pytest.mark.few(1)
@pytest.mark.parametrize("name", UNTIED)
def test_ids_that_no_text_has_get_no_embedding_gradient(name):
    run = run_of(name)
    gradient = by_path(run()[1])["['trunk']['embedding']['weight'].value"]
    used = np.unique(np.concatenate([run.tokens[i, :n] for i, n in enumerate(LENGTHS)]))
    last = [run.tokens[i, n - 1] for i, n in enumerate(LENGTHS)]  # predicts nothing
    is_zero = ~gradient.any(axis=1)
    assert is_zero[np.setdiff1d(np.arange(len(gradient)), used)].all()
    assert not is_zero[np.setdiff1d(used, last)].any()


def groups_of(params):
    """Leaves of the trunk by what owns them: a layer, or a part beside the layers."""
    groups = {}
    flat, _ = jax.tree.flatten_with_path(params)
    for index, (path, _) in enumerate(flat):
        owner = jax.tree_util.keystr(path[: 3 if "layers" in str(path[1]) else 2])
        if "draft_head" not in owner:
            groups.setdefault(owner, []).append(index)
    return groups


def moved(params, indices, seed, step):
    """The parameters moved along a random direction in some leaves, and the direction."""
    leaves, tree = jax.tree.flatten(params)
    rng, direction = np.random.default_rng(seed), {}
    for index in indices:
        leaf = np.asarray(leaves[index])
        draw = rng.normal(size=leaf.shape) * (leaf.std() or 1.0)
        direction[index] = draw.astype(leaf.dtype)
        leaves[index] = jnp.asarray(leaf + np.float32(step) * direction[index])
    return jax.tree.unflatten(tree, leaves), direction


@pytest.mark.soak
def test_the_gradient_is_the_slope_in_every_direction(run):
    """Along a line on which no token changes its experts: there the loss would jump."""
    here, leaves = run.loss(run.params), jax.tree.leaves(run()[1])
    for owner, indices in groups_of(run.params).items():
        for seed, step in enumerate(np.repeat(STEPS, 4)):
            ends = [moved(run.params, indices, seed, sign * step) for sign in (-1, 1)]
            low, high = (run.loss(params) for params, _ in ends)
            direction = ends[0][1]
            slope = sum((np.asarray(leaves[i], np.float64) * d).sum() for i, d in direction.items())
            if abs(high + low - 2 * here) < 1e-4 + 0.004 * abs(high - low):
                break
        else:
            pytest.fail(f"{owner}: every direction changes experts")
        assert abs((high - low) / (2 * step) - slope) <= 0.3 + 0.005 * abs(slope), owner


@pytest.mark.soak
def test_a_gradient_that_lacks_a_chunk_is_seen(monkeypatch):
    """A loop that runs its first tile alone, as its bound does not follow from the shapes."""
    stacked = dispatch.stacked

    def short(count, most, body, batch=1):
        return stacked(jnp.minimum(count, 1), most, body, batch=batch)

    monkeypatch.setattr(dispatch, "stacked", short)
    run = run_of.__wrapped__("lfm2")
    with pytest.raises(AssertionError):
        test_values_are_those_of_another_implementation(run)
