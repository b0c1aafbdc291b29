"""Prompts and parameters in, checked samples out; refusals come before anything is queued."""

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Integral
from typing import Any

import numpy as np

from jaxspec.outputs import Sample
from jaxspec.request import Request
from jaxspec.row import MAX_STOP_IDS
from jaxspec.sampling_params import SamplingParams
from jaxspec.stop_strings import StopStrings
from jaxspec.tokenizer import Tokenizer

Prompt = str | Mapping[str, Any]


class InputProcessor:
    """Makes the samples of prompts: token ids, noise seeds and stops; any thread may call."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        *,
        vocab_size: int,
        eos_ids: Sequence[int],
        request_key: Callable[[Sequence[int], int], int],
        seed: int,
    ):
        """Keep what all prompts share.

        `eos_ids` are the model's; the tokenizer's count too, where the vocabulary has them.
        `request_key(prompt, seed)` is the proposer's; `seed` serves requests without one.
        """
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        ends = {*eos_ids, *(tokenizer.eos_ids if tokenizer else ())}
        self._eos_ids = tuple(sorted(i for i in ends if 0 <= i < vocab_size))
        self._request_key, self._seed = request_key, seed
        self._num_prompts = 0  # which the noise of prompts without a seed goes by
        self._lock = threading.Lock()

    def process(
        self, prompts: Sequence[Prompt], params: Sequence[SamplingParams]
    ) -> list[list[Sample]]:
        """The samples of each prompt, unqueued.

        Raises:
            ValueError: an empty prompt, an id outside the vocabulary, text without a tokenizer, or
                too many stop ids.
        """
        encoded = [tuple(self._encode(prompt)) for prompt in prompts]
        for number, ids in enumerate(encoded, 1):
            name = "the prompt" if len(encoded) == 1 else f"prompt {number} of {len(encoded)}"
            if not ids:
                raise ValueError(
                    f"A prompt must have at least one token, and {name} has none. Give it some "
                    "text or token ids."
                )
            self._check_ids(name, ids)
        stop_ids = [self._stop_ids(param) for param in params]
        with self._lock:
            first = self._num_prompts
            self._num_prompts += len(encoded)
        return [
            self._samples(prompt, param, stops, number)
            for number, (prompt, param, stops) in enumerate(
                zip(encoded, params, stop_ids, strict=True), first
            )
        ]

    def require_tokenizer(self, inputs: str) -> Tokenizer:
        """The tokenizer, or a ValueError that says that `inputs` need one."""
        if self._tokenizer is None:
            raise ValueError(
                f"The model's folder has no tokenizer.json, which {inputs} need. Copy it "
                "there from the checkpoint, or work with token ids: {'prompt_token_ids': [...]}."
            )
        return self._tokenizer

    def _stop_ids(self, params: SamplingParams) -> tuple[int, ...]:
        """The token ids that end a request, once it is known that stop strings can, too."""
        own_eos = () if params.ignore_eos else self._eos_ids
        stop_ids = tuple(dict.fromkeys((*params.stop_token_ids, *own_eos)))
        self._check_ids("stop_token_ids", stop_ids)
        if len(stop_ids) > MAX_STOP_IDS:
            raise ValueError(
                f"A request may have at most {MAX_STOP_IDS} stop token ids, the model's own "
                f"included, got {len(stop_ids)}. Use stop strings for the rest."
            )
        if params.stop:
            self.require_tokenizer("stop strings")
        return stop_ids

    def _samples(
        self,
        prompt: tuple[int, ...],
        params: SamplingParams,
        stop_ids: tuple[int, ...],
        number: int,
    ) -> list[Sample]:
        # The first word keeps seeds that users give apart from those drawn here.
        if params.seed is None:
            entropy = [1, self._seed % 2**32, number]
        else:
            entropy = [2, *divmod(params.seed % 2**64, 2**32)]
        samples: list[Sample] = []
        for index in range(params.n):
            seed = int(np.random.SeedSequence([*entropy, index]).generate_state(1)[0])
            request = Request(
                prompt=prompt,
                params=params,
                seed=seed,
                stop_ids=stop_ids,
                proposer_key=self._request_key(prompt, seed),
                leader=samples[0].request if samples else None,
            )
            stream = self._tokenizer.stream() if self._tokenizer else None
            stops = StopStrings(params.stop) if params.stop else None
            samples.append(Sample(request, index, stream, stops))
        return samples

    def _encode(self, prompt: Prompt) -> Sequence[int]:
        if isinstance(prompt, Mapping) and "prompt_token_ids" in prompt:
            ids = prompt["prompt_token_ids"]
            if not isinstance(ids, Iterable) or any(not isinstance(i, Integral) for i in ids):
                raise ValueError(f"prompt_token_ids must be a list of integers, got {ids!r:.60}.")
            return [int(token) for token in ids]
        text = prompt.get("prompt") if isinstance(prompt, Mapping) else prompt
        if not isinstance(text, str):
            raise ValueError(
                "A prompt must be a text or a dict with 'prompt' or 'prompt_token_ids', got "
                f"{prompt!r:.60}. Token ids go in as {{'prompt_token_ids': [...]}}."
            )
        return self.require_tokenizer("text prompts").encode(text)

    def _check_ids(self, name: str, ids: Sequence[int]) -> None:
        if wrong := [token for token in ids if not 0 <= token < self._vocab_size]:
            raise ValueError(
                f"Token ids must be 0 to {self._vocab_size - 1} with this model, and {name} has "
                f"{', '.join(map(str, wrong[:5]))}. Use the ids of this model's own tokenizer."
            )


def params_of(
    params: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> list[SamplingParams]:
    """Parameters for each of `count` prompts; None is greedy.

    Raises:
        ValueError: a list of another length.
    """
    if params is None:
        return [SamplingParams(temperature=0.0)] * count
    if isinstance(params, SamplingParams):
        return [params] * count
    if not isinstance(params, Sequence) or any(not isinstance(p, SamplingParams) for p in params):
        raise ValueError(
            f"sampling_params must be SamplingParams, one or a list of them, got {params!r:.60}. "
            "Build them as in SamplingParams(temperature=0.8)."
        )
    if len(params) != count:
        raise ValueError(
            f"sampling_params must be one for all prompts or one for each, got {len(params)} for "
            f"{count} prompts."
        )
    return list(params)
