"""Rollouts of marin: an engine as the inference context of its environments and rollout workers."""
# pyright: reportMissingImports=false

import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxspec.api.llm import LLM
from jaxspec.requests.outputs import CompletionOutput, RequestOutput
from jaxspec.requests.sampling_params import PROCESSED, SamplingParams

try:
    from levanter.models.lm_model import LmHeadModel
    from marin.rl.decoding import DecodingConfig, DecodingStrategy
    from marin.rl.environments.inference_ctx.base import BaseInferenceContext
    from openai.types import CompletionUsage
    from openai.types.chat import ChatCompletion, ChatCompletionMessage, ChatCompletionTokenLogprob
    from openai.types.chat.chat_completion import Choice, ChoiceLogprobs
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f'jaxspec.rollouts.marin needs marin: {error}. Install it: pip install -e ".[marin]".'
    ) from error


class JaxspecInferenceContext(BaseInferenceContext):
    """An engine that generates for marin's environments, in the process of the rollout worker.

    Args:
        llm: The engine, with a tokenizer and a chat template. `shutdown` closes it.
        tokenizer: levanter's tokenizer of the model, which environments read.
        mesh: Mesh on which a worker receives weights; None as for marin's vLLM.
        axis_mapping: Axes of the mesh, likewise.
    """

    def __init__(
        self,
        *,
        llm: LLM,
        tokenizer: Any,
        mesh: Any = None,
        axis_mapping: Mapping[str, Any] | None = None,
    ):
        self.tokenizer, self.mesh, self.axis_mapping = tokenizer, mesh, dict(axis_mapping or {})
        self._llm = llm

    def start_server(self, model: LmHeadModel) -> None:
        """Give the engine the weights of the worker's first policy."""
        self.reload_model(model, {})

    def reload_model(self, model: LmHeadModel | None, state_dict: dict) -> LmHeadModel | None:
        """Give the engine new weights between two of its steps; return `model`.

        Args:
            model: levanter's model, whose state dict is taken if `state_dict` is empty.
            state_dict: Arrays of `WeightUpdate.state_dict`, by names as in Hugging Face's
                checkpoints. levanter splits the axes of heads, which are joined here.

        Raises:
            ValueError: neither has weights, or as in `LLM.update_weights`.
        """
        tensors: Mapping[str, Any] = state_dict or ({} if model is None else model.to_state_dict())
        if not tensors:
            raise ValueError(
                "reload_model needs a model or its state dict, got neither. Pass what "
                "WeightTransferClient.receive_weights returned."
            )
        self._llm.update_weights(_joined(tensors, self._llm.weight_specs()))
        return model

    def shutdown(self) -> None:
        """Close the engine."""
        self._llm.close()

    def get_metrics(self) -> dict[str, Any]:
        """Return the engine's numbers of steps, tokens and rounds, and its rates."""
        found = self._llm.metrics()
        return {f"jaxspec/{name}": each for name, each in found.items() if _is_number(each)}

    def batch_completions(
        self,
        prompts: list[str] | list[list[dict]],
        n: int,
        decoding: DecodingConfig,
        system_prompt: str | None = None,
    ) -> list[ChatCompletion]:
        """Return `n` answers of each prompt, a text or a conversation.

        Log-probabilities are of the distribution that tokens are drawn from, so `temperature`
        divides their logits, as in marin's trainer.

        Raises:
            RuntimeError: a sample ended with "error" or "abort".
        """
        before = [] if system_prompt is None else [{"role": "system", "content": system_prompt}]
        chats = [
            [*before, {"role": "user", "content": each}] if isinstance(each, str) else each
            for each in prompts
        ]
        params = _params(self.resolve_decoding(decoding), n)
        return [self._completion(each) for each in self._llm.chat(chats, params, use_tqdm=False)]

    def tokenize_prompt(
        self, prompt: str, choice: Choice | None = None, system_prompt: str | None = None
    ) -> np.ndarray:
        """Return the ids of the prompt that `choice` answers, as the engine computed them."""
        if choice is None:
            return super().tokenize_prompt(prompt, choice, system_prompt)
        return _ids_of(choice, "prompt_token_ids")

    def response_tokens_from_choice(self, choice: Choice) -> np.ndarray:
        """Return the ids of an answer; their texts need not name them."""
        return _ids_of(choice, "response_token_ids")

    def _completion(self, output: RequestOutput) -> ChatCompletion:
        num_prompt = len(output.prompt_token_ids)
        num_tokens = sum(len(sample.token_ids) for sample in output.outputs)
        return ChatCompletion(
            id=output.request_id,
            choices=[self._choice(output, sample) for sample in output.outputs],
            created=int(time.time()),
            model=self._llm.model_name,
            object="chat.completion",
            usage=CompletionUsage(
                completion_tokens=num_tokens,
                prompt_tokens=num_prompt,
                total_tokens=num_prompt + num_tokens,
            ),
        )

    def _choice(self, output: RequestOutput, sample: CompletionOutput) -> Choice:
        if sample.finish_reason not in ("stop", "length"):
            raise RuntimeError(
                f"An answer must end by a stop or its length, and one of request "
                f"{output.request_id} ended with {sample.finish_reason!r}. Ask for it again."
            )
        found = sample.token_logprobs
        assert found is not None  # `_params` sets `logprobs`
        content = [
            ChatCompletionTokenLogprob(
                token=self.tokenizer.decode([token]), logprob=logprob, top_logprobs=[]
            )
            for token, logprob in zip(sample.token_ids, map(float, found), strict=True)
        ]
        return Choice.model_validate(
            {
                "finish_reason": sample.finish_reason,
                "index": sample.index,
                "logprobs": ChoiceLogprobs(content=content),
                "message": ChatCompletionMessage(content=sample.text, role="assistant"),
                # Fields of their own, as those of marin's context of vLLM.
                "prompt_token_ids": list(output.prompt_token_ids),
                "response_token_ids": list(sample.token_ids),
            }
        )


def _ids_of(choice: Choice, name: str) -> np.ndarray:
    return np.array((choice.model_extra or {})[name], np.int32)


def _params(decoding: DecodingConfig, n: int) -> SamplingParams:
    optional = {
        "top_k": decoding.top_k,
        "top_p": decoding.top_p,
        "min_p": decoding.min_p,
        "repetition_penalty": decoding.repetition_penalty,
        "presence_penalty": decoding.presence_penalty,
        "frequency_penalty": decoding.frequency_penalty,
        "min_tokens": decoding.min_output_tokens,
        "stop": decoding.stop_strings,
        "stop_token_ids": decoding.stop_token_ids,
        "seed": decoding.seed,
    }
    is_greedy = decoding.strategy == DecodingStrategy.GREEDY
    return SamplingParams(
        n=n,
        temperature=0.0 if is_greedy else decoding.temperature,
        max_tokens=decoding.max_output_tokens,
        ignore_eos=decoding.ignore_eos,
        logprobs=0,
        logprobs_mode=PROCESSED,
        **{name: value for name, value in optional.items() if value is not None},
    )


def _joined(
    tensors: Mapping[str, Any], specs: Mapping[str, jax.ShapeDtypeStruct]
) -> dict[str, Any]:
    """Return the tensors, those that have the axes of `specs` in parts with these joined."""
    return {
        name: tensor.reshape(specs[name].shape)
        if name in specs and _is_split(tensor.shape, specs[name].shape)
        else tensor
        for name, tensor in tensors.items()
    }


def _is_split(shape: Sequence[int], whole: Sequence[int]) -> bool:
    """Return whether consecutive axes of `shape`, joined, are those of `whole`.

    Other shapes of as many elements, such as that of a transposed matrix, are left to
    `LLM.update_weights`, which refuses them.
    """
    sizes = list(shape)
    for size in whole:
        joined = 1
        while sizes and joined < size:
            joined *= sizes.pop(0)
        if joined != size:
            return False
    return all(size == 1 for size in sizes)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
