"""Prompts and parameters in, checked samples out; refusals come before anything is queued."""

import threading
from collections.abc import Callable, Mapping, Sequence, Sized
from typing import Any

import numpy as np

from jaxspec.bias_tables import MAX_STOP_IDS
from jaxspec.checks import are_integers, integer, items, shown
from jaxspec.outputs import Sample
from jaxspec.request import INT32_MAX, Request
from jaxspec.sampling_params import SamplingParams
from jaxspec.stop_strings import StopStrings
from jaxspec.token_checks import bad_word_ids, check_biases, check_ids
from jaxspec.tokenizer import Tokenizer

Prompt = str | Mapping[str, Any]

MAX_SAMPLES = 2**18
"""Samples of one call; each holds some 1.4 kB from the start."""
MAX_PROMPT_TOKENS = 2**28
"""Prompt tokens of one call over all samples, each of which keeps a list of them."""


class InputProcessor:
    """Makes the samples of prompts: token ids, noise seeds and stops; any thread may call."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        *,
        vocab_size: int,
        max_model_len: int,
        eos_ids: Sequence[int],
        request_key: Callable[[Sequence[int], int], int],
        seed: int,
    ):
        """Keep what all prompts share.

        `eos_ids` are the model's; the tokenizer's count too, where the vocabulary has them.
        `request_key(prompt, seed)` is the proposer's; `seed` serves requests without one.
        """
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._max_model_len = max_model_len
        ends = {*eos_ids, *(tokenizer.eos_ids if tokenizer else ())}
        self.eos_ids = tuple(sorted(i for i in ends if 0 <= i < vocab_size))
        self._request_key, self._seed = request_key, seed
        self._num_prompts = 0  # which the noise of prompts without a seed goes by
        self._lock = threading.Lock()

    def process(
        self,
        prompts: Sequence[Prompt],
        params: Sequence[SamplingParams],
        request_ids: Sequence[str] | None = None,
    ) -> list[list[Sample]]:
        """The samples of each prompt, unqueued.

        `request_ids`: what the samples of each prompt are called; None: numbers.

        Raises:
            ValueError: an empty prompt, one that is too long with its max_tokens, an id outside the
                vocabulary, text without a tokenizer, too many stop ids, biases or samples, or
                another number of request ids.
        """
        _check_samples(params)
        given = None if request_ids is None else _read_names(request_ids, len(prompts))
        stop_ids = [self._stop_ids(param) for param in params]
        bad_words = [self._bad_words(*each) for each in zip(params, stop_ids, strict=True)]
        encoded, held = list[tuple[int, ...]](), 0
        for number, (prompt, param) in enumerate(zip(prompts, params, strict=True), 1):
            ids = tuple(self._encode(prompt))
            name = "the prompt" if len(prompts) == 1 else f"prompt {number} of {len(prompts)}"
            if not ids:
                raise ValueError(
                    f"A prompt must have at least one token, and {name} has none. Give it some "
                    "text or token ids."
                )
            check_ids(name, ids, self._vocab_size)
            held += len(ids) * param.n
            self._check_length(len(ids), param, held)
            encoded.append(ids)
        with self._lock:
            first = self._num_prompts
            self._num_prompts += len(encoded)
        numbers = range(first, first + len(encoded))
        names = given or map(str, numbers)
        return [
            self._samples(*each)
            for each in zip(names, encoded, params, stop_ids, bad_words, numbers, strict=True)
        ]

    def chat(
        self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]
    ) -> dict[str, Any]:
        """The prompt of a conversation; `options` are those of `Tokenizer.render_chat`.

        Raises:
            ValueError: no tokenizer, or as in `Tokenizer.chat`.
        """
        bound = {"max_model_len": self._max_model_len}
        ids = self.require_tokenizer("chats").chat(messages, **{**options, **bound})
        return {"prompt_token_ids": ids}

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
        own_eos = () if params.ignore_eos else self.eos_ids
        stop_ids = tuple(dict.fromkeys((*params.stop_token_ids, *own_eos)))
        check_ids("stop_token_ids", stop_ids, self._vocab_size)
        if len(stop_ids) > MAX_STOP_IDS:
            raise ValueError(
                f"A request may have at most {MAX_STOP_IDS} stop token ids, the model's own "
                f"included, got {len(stop_ids)}. Use stop strings for the rest."
            )
        if params.stop:
            self.require_tokenizer("stop strings")
        return stop_ids

    def _bad_words(
        self, params: SamplingParams, stop_ids: Sequence[int]
    ) -> tuple[tuple[int, ...], ...]:
        """Their token ids, once it is known that the vocabulary has what a request asks for."""
        check_biases(params, stop_ids, self._vocab_size)
        if not params.bad_words:
            return ()
        tokenizer = self.require_tokenizer("bad words")
        return bad_word_ids(params.bad_words, tokenizer, self._vocab_size)

    def _samples(
        self,
        request_id: str,
        prompt: tuple[int, ...],
        params: SamplingParams,
        stop_ids: tuple[int, ...],
        bad_words: tuple[tuple[int, ...], ...],
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
                bad_words=bad_words,
                proposer_key=integer("request_key", self._request_key(prompt, seed), 0, INT32_MAX),
                leader=samples[0].request if samples else None,
                request_id=request_id,
                index=index,
            )
            stream = self._tokenizer.stream() if self._tokenizer else None
            stops = StopStrings(params.stop) if params.stop else None
            samples.append(Sample(request, stream, stops))
        return samples

    def _encode(self, prompt: Prompt) -> Sequence[int]:
        key, value = "prompt", prompt
        if isinstance(prompt, Mapping) and len(prompt) == 1:
            ((key, value),) = prompt.items()
        if key == "prompt_token_ids":
            return self._read_ids(value)
        if key != "prompt" or not isinstance(value, str):
            raise ValueError(
                "A prompt must be a text or a dict with 'prompt' or 'prompt_token_ids', got "
                f"{shown(prompt)}. Token ids go in as {{'prompt_token_ids': [...]}}."
            )
        tokenizer = self.require_tokenizer("text prompts")
        return tokenizer.encode(value, max_model_len=self._max_model_len)

    def _read_ids(self, value: Any) -> list[int]:
        """The ids as Python's integers; no more are read than could fit."""
        ids = items(value, self._max_model_len)
        if ids is None or not are_integers(ids):
            raise ValueError(f"prompt_token_ids must be a list of integers, got {shown(value)}.")
        if len(ids) > self._max_model_len:
            count = len(value) if isinstance(value, Sized) else f"more than {self._max_model_len}"
            raise ValueError(
                f"A prompt must fit max_model_len={self._max_model_len}, got {count} token ids. "
                "Shorten it, or raise max_model_len."
            )
        return list(map(int, ids))

    def _check_length(self, length: int, params: SamplingParams, held: int) -> None:
        """Hold a prompt with its max_tokens against max_model_len; no other place does.

        `held`: prompt tokens of the call so far, over all samples.
        """
        if length + params.max_tokens > self._max_model_len:
            raise ValueError(
                f"A prompt and its max_tokens must fit max_model_len={self._max_model_len}: "
                f"{length} + {params.max_tokens} tokens came. Shorten one, or raise max_model_len."
            )
        if held > MAX_PROMPT_TOKENS:
            raise ValueError(
                f"One call may have at most {MAX_PROMPT_TOKENS:,} prompt tokens over all samples, "
                f"got {held:,} or more. Lower n, or make several calls."
            )


def prompts_of(prompts: Any) -> list[Prompt]:
    """The prompts of a call: one, or those of an ordered collection or an iterator.

    Raises:
        ValueError: it is none of these, or too many.
    """
    if isinstance(prompts, str | Mapping):
        return [prompts]
    found = items(prompts, MAX_SAMPLES)
    if found is None:
        raise ValueError(
            "prompts must be a text, a dict with 'prompt' or 'prompt_token_ids', or a list of "
            f"them, got {shown(prompts)}."
        )
    if len(found) > MAX_SAMPLES:
        raise ValueError(
            f"One call may have at most {MAX_SAMPLES:,} prompts, got more. Make several calls."
        )
    return found


def _read_names(names: Any, count: int) -> list[str]:
    found = items(names, count)
    if found is None or len(found) != count or not all(isinstance(name, str) for name in found):
        raise ValueError(
            f"request_ids must be a list of {count} texts, one for each prompt, got {shown(names)}."
        )
    return found


def _check_samples(params: Sequence[SamplingParams]) -> None:
    """Refuse more samples than one call may have.

    Raises:
        ValueError: the sum of all `n` is above `MAX_SAMPLES`.
    """
    if (count := sum(param.n for param in params)) > MAX_SAMPLES:
        raise ValueError(
            f"One call may have at most {MAX_SAMPLES:,} samples, got {count:,}. Lower n, or make "
            "several calls."
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
            f"sampling_params must be SamplingParams, one or a list of them, got {shown(params)}. "
            "Build them as in SamplingParams(temperature=0.8)."
        )
    if len(params) != count:
        raise ValueError(
            f"sampling_params must be one for all prompts or one for each, got {len(params)} for "
            f"{count} prompts."
        )
    return list(params)
