"""Rollouts of tunix: a model for its trainer, and an engine that generates for it.

`rl_cluster.ClusterConfig(rollout_engine=functools.partial(JaxspecRollout, llm=llm))` chooses it,
with a `JaxspecActor(llm)` as the actor.
"""
# pyright: reportMissingImports=false

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxspec.api.differentiable import differentiable
from jaxspec.api.llm import LLM
from jaxspec.checks import shown
from jaxspec.models.sequence import text_logits
from jaxspec.requests.outputs import CompletionOutput, RequestOutput
from jaxspec.requests.sampling_params import PROCESSED, SamplingParams

try:
    from tunix.rl.rollout.base_rollout import BaseRollout, RolloutConfig, RolloutOutput
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        'jaxspec.rollouts.tunix needs tunix, which is not installed: pip install -e ".[rollouts]".'
    ) from error


class JaxspecActor(nnx.Module):
    """The model of an `LLM` with the call of tunix's models.

    Its parameters are copies of the engine's. Prompts are padded on the left; the padding is moved
    to the end, because recurrent layers would read it.
    """

    def __init__(self, llm: LLM):
        """Copy the parameters of `llm`; raises as `jaxspec.differentiable` does."""
        model = differentiable(llm)
        self.model = nnx.merge(model.graph, jax.tree.map(jnp.copy, model.params))

    def __call__(
        self, tokens, positions=None, cache=None, attention_mask=None, segment_ids=None
    ) -> tuple[jax.Array, None]:
        """Return the float32 logits `[texts, length, vocabulary]` and no cache.

        Args:
            tokens: Token ids `[texts, length]`.
            positions: Not read: the tokens of a text have consecutive positions.
            cache: Must be None.
            attention_mask: Not read: attention is causal, without padding.
            segment_ids: 1 for tokens, 0 for padding, as tunix passes them without packing. None
                means no padding.
        """
        if cache is not None:
            raise ValueError(f"JaxspecActor has no decode cache, got {shown(cache)}. Pass None.")
        is_token = jnp.ones_like(tokens) if segment_ids is None else segment_ids
        place = jnp.arange(tokens.shape[1])[None]
        before = jnp.argmax(is_token > 0, axis=1)[:, None]
        moved = jnp.take_along_axis(tokens, (place + before) % tokens.shape[1], axis=1)
        logits = text_logits(self.model, moved, (is_token > 0).sum(axis=1, dtype=jnp.int32))
        back = (place - before) % tokens.shape[1]
        return jnp.take_along_axis(logits, back[..., None], axis=1), None


def _of_actor(params: nnx.State) -> Any:
    return params["model"]


class JaxspecRollout(BaseRollout):
    """An engine of tunix's `RLCluster`, in the trainer's process.

    Args:
        llm: The engine. It takes the actor's weights at once, and at each `sync_weights`.
        rollout_actor: The trained model.
        tokenizer: tunix's adapter of the trainer's tokenizer. Its `pad_id` must not be an id that
            ends a sample, because tunix finds padding by its id.
        mesh: Not read: the engine's device computes.
        rollout_config: tunix's `RolloutConfig`.
        weights_of: Function from the actor's parameters to what `LLM.update_weights` takes. The
            default is for a `JaxspecActor`; that of another model returns published names.

    Raises:
        ValueError: the padding id ends samples.
    """

    def __init__(
        self,
        *,
        llm: LLM,
        rollout_actor: nnx.Module,
        tokenizer: Any,
        mesh: Any = None,
        rollout_config: RolloutConfig,
        weights_of: Callable[[nnx.State], Any] = _of_actor,
    ):
        self._llm, self._tokenizer, self._config = llm, tokenizer, rollout_config
        self._weights_of = weights_of
        self._num_calls = 0
        if self.pad_id() in (ends := [self.eos_id(), *(rollout_config.eos_tokens or ())]):
            raise ValueError(
                "tokenizer.pad_id() must be an id that ends no sample, got "
                f"{self.pad_id()}, which is among {ends}. Choose an id that no text has."
            )
        self.update_params(nnx.state(rollout_actor, nnx.Param))

    def generate(
        self, prompts: Sequence[str], rollout_config: RolloutConfig, **kwargs: Any
    ) -> RolloutOutput:
        """Generate one sample per prompt; equal neighbours share the computation of their prompt.

        Log-probabilities are of the distribution that tokens are drawn from, so `temperature`
        divides their logits, as in tunix's trainer. Final stop ids are part of the tokens.
        """
        self._num_calls += 1
        groups = [(text, len([*same])) for text, same in itertools.groupby(map(str, prompts))]
        params = [self._params(rollout_config, i, count) for i, (_, count) in enumerate(groups)]
        outputs = self._llm.generate([text for text, _ in groups], params, use_tqdm=False)
        rows = [(output, sample) for output in outputs for sample in output.outputs]
        return RolloutOutput(
            text=[sample.text for _, sample in rows],
            logits=[],
            tokens=[np.array(sample.token_ids, np.int32) for _, sample in rows],
            left_padded_prompt_tokens=self._padded(rows, rollout_config.max_prompt_length),
            logprobs=_logprobs(rows) if rollout_config.return_logprobs else None,
        )

    def get_per_token_logps(self, prompt_tokens: Any, completion_tokens: Any) -> jax.Array:
        """Return log-probabilities of the completions by the engine's weights, 0 for padding."""
        prompts, completions = np.asarray(prompt_tokens), np.asarray(completion_tokens)
        pad = self.pad_id()
        whole = [
            (prompt[prompt != pad].tolist(), rest[rest != pad].tolist())
            for prompt, rest in zip(prompts, completions, strict=True)
        ]
        scores = self._llm.score(
            [{"prompt_token_ids": prompt + rest} for prompt, rest in whole],
            temperature=self._config.temperature,
            logprobs_mode=PROCESSED,
        )
        found = np.zeros(completions.shape, np.float32)
        for row, (prompt, rest), score in zip(found, whole, scores, strict=True):
            row[: len(rest)] = score.token_logprobs[len(prompt) :]
        return jnp.asarray(found)

    def update_params(self, params: Any, filter_types: tuple[Any, ...] | None = None) -> None:
        """Give the engine new weights.

        Raises:
            ValueError: they are those of an adapter alone, or as in `LLM.update_weights`.
        """
        given = filter_types if isinstance(filter_types, tuple) else (filter_types,)
        if nnx.LoRAParam in given:
            raise ValueError(
                "JaxspecRollout takes all parameters of a model, got those of a LoRA adapter. "
                "Merge the adapter in the trainer."
            )
        # On a CPU tunix forbids all transfers here; the weights stay on the device, indices do not.
        with jax.transfer_guard("allow"):
            self._llm.update_weights(self._weights_of(params))

    def pad_id(self) -> int:
        """Return the id of padding."""
        return self._tokenizer.pad_id()

    def eos_id(self) -> int:
        """Return the id that ends a text."""
        return self._tokenizer.eos_id()

    def model(self) -> None:
        """Return None, so that tunix updates no engine whose model shares the actor's arrays."""
        return None

    def _params(self, config: RolloutConfig, group: int, count: int) -> SamplingParams:
        return SamplingParams(
            n=count,
            temperature=config.temperature,
            top_p=1.0 if config.top_p is None else config.top_p,
            top_k=-1 if config.top_k is None else config.top_k,
            max_tokens=config.max_tokens_to_generate,
            stop_token_ids=config.eos_tokens or [self.eos_id()],
            seed=None if config.seed is None else self._seed(config.seed, group),
            logprobs=0 if config.return_logprobs else None,
            logprobs_mode=PROCESSED,
        )

    def _seed(self, seed: Any, group: int) -> int:
        """Return a seed of its own for each call and group."""
        words = [*np.asarray(jax.random.key_data(seed) if _is_key(seed) else seed).ravel()]
        mixed = np.random.SeedSequence([*map(int, words), self._num_calls, group])
        return int(mixed.generate_state(1)[0] >> 1)

    def _padded(self, rows: Sequence[tuple[RequestOutput, Any]], length: int) -> np.ndarray:
        length = max([length, *(len(output.prompt_token_ids) for output, _ in rows)])
        padded = np.full((len(rows), length), self.pad_id(), np.int32)
        for row, (output, _) in zip(padded, rows, strict=True):
            row[length - len(output.prompt_token_ids) :] = output.prompt_token_ids
        return padded


def _logprobs(rows: Sequence[tuple[RequestOutput, CompletionOutput]]) -> list[np.ndarray]:
    return [np.asarray(sample.token_logprobs, np.float32) for _, sample in rows]


def _is_key(seed: Any) -> bool:
    return isinstance(seed, jax.Array) and jnp.issubdtype(seed.dtype, jax.dtypes.prng_key)
