"""Request migration: export a request with its computed prefix, and continue it elsewhere.

`export_request` takes a running request out of an engine, `prefill` computes only a prompt, and
`import_request` continues either in another engine with the same model.
"""

import dataclasses
from collections.abc import Generator
from typing import Any, Protocol

from jaxspec.api.inputs import InputProcessor, check_ids
from jaxspec.checks import shown
from jaxspec.engine.session import Session
from jaxspec.plan.block_plan import Copied
from jaxspec.plan.step_shapes import SchedulerLimits
from jaxspec.prefix.cache import PrefixCache
from jaxspec.requests.outputs import Sample, Stream, TextDelta
from jaxspec.requests.prompts import Prompt
from jaxspec.requests.request import Request
from jaxspec.requests.sampling_features import SamplingFeatures
from jaxspec.requests.sampling_params import SamplingParams
from jaxspec.runner.model_runner import ModelRunner
from jaxspec.runner.warmup import of_blocks
from jaxspec.transfer import RequestState


class Travels(Protocol):
    """Interface of `LLM` used by this module."""

    session: Session
    limits: SchedulerLimits
    _inputs: InputProcessor
    _runner: ModelRunner

    def one_prompt(self, prompt: Any, call: str, /) -> Any:
        """Return the prompt of a call for a single prompt; see `LLMEngine.one_prompt`."""
        ...

    def prepare_one(self, prompt: Any, params: Any, request_id: Any, priority: Any, /) -> Any:
        """Create the samples of one prompt; see `LLMEngine.prepare_one`."""
        ...

    def _compile(self, feature_sets: set[SamplingFeatures], /) -> None: ...


def export_request(llm: Travels, request_id: str) -> RequestState:
    """Abort a request and return its state, to be continued by another engine.

    Its output here ends with "abort" and has all tokens of the exported state; the importing engine
    returns those that follow. Any thread may call it while others wait in `generate` or read the
    stream. It waits for the steps in flight for the request.

    Args:
        llm: The `LLM`.
        request_id: Id of the request.

    Returns:
        The state of the request, with a copy of its computed prefix.

    Raises:
        ValueError: no running or waiting request has this id, or it has several samples.
        RuntimeError: as in `generate`.
    """
    llm.session.require_usable()
    name = str(request_id)
    samples = llm.session.of_request(name)
    if len(samples) != 1 or samples[0].request.params.n > 1:
        raise ValueError(
            "export_request takes the id of a request that runs or waits and has one sample, and "
            f"{shown(name)} has {len(samples)} samples here. Give each sample a request of its own "
            "(n=1) with another id."
        )
    _compile_copies(llm)
    copied = llm.session.withdraw(samples[0])
    if copied is None:
        raise ValueError(
            f"export_request takes the id of a request that runs or waits, and {shown(name)} has "
            "just ended. Its output is whole."
        )
    return _state_of(llm, samples[0], copied)


def prefill(
    llm: Travels,
    prompt: Prompt,
    sampling_params: SamplingParams | None = None,
    *,
    priority: int = 0,
    request_id: str | None = None,
) -> RequestState:
    """Compute a prompt except its last token, for another engine to continue by `import_request`.

    That engine computes the last token, and so its logits, noise and drafts.

    Args:
        llm: The `LLM`.
        prompt: A prompt as in `stream`.
        sampling_params: As in `stream`.
        priority: As in `stream`.
        request_id: As in `stream`.

    Returns:
        The state of the request. Its `num_computed` is the number of tokens included, normally the
        prompt's less one. It is smaller, or even 0, with `mamba_cache_mode="align"`, if no
        checkpoint slot was free for the state at the end, or if the cached prefix was evicted
        before the copy.

    Raises:
        ValueError: `n` is above 1, the engine caches no prefixes, the parameters rule out cached
            prefixes (penalties, `prompt_logprobs`), or as in `stream`.
        RuntimeError: the request was aborted or failed, or as in `generate`.
    """
    only = llm.one_prompt(prompt, "prefill")
    sample, *others = llm.prepare_one(only, sampling_params, request_id, priority)
    if others:
        count = 1 + len(others)
        raise ValueError(f"prefill takes a request of one sample, got n={count}. Set n=1.")
    request, session = sample.request, llm.session
    _check_prefill(llm, request)
    if len(request.prompt) == 1:  # only the last token, so there is nothing to compute
        return _state_of(llm, sample, Copied(0))
    request.is_prefill_only = True
    _compile_copies(llm)
    try:
        session.add([sample])
        while not request.finish:
            session.step()
        copied = session.withdraw(sample)
    finally:
        session.abort([sample])
    if copied is None or request.num_computed < len(request.prompt) - 1:
        raise RuntimeError(
            f"Request {shown(sample.request_id)} ended with {request.finish.reason!r} before its "
            "prompt was computed. Call prefill again."
        )
    return _state_of(llm, sample, copied)


def import_request(llm: Travels, state: RequestState) -> Stream:
    """Continue a request exported by another engine.

    The request is checked at once and queued at the first `next`. Its computed prefix is used like
    a cached prefix of this engine; without it the prefix is computed again, and the tokens are the
    same.

    Args:
        llm: The `LLM`.
        state: State of the request, from `export_request` or `prefill`.

    Returns:
        An iterator over the deltas that follow the exported output.

    Raises:
        ValueError: the state belongs to another model, other weights or another dtype; the request
            has finished, does not fit, or has several samples; or a parameter is invalid here.
            Nothing is queued.
        RuntimeError: as in `generate`.
    """
    llm.session.require_usable()
    if not isinstance(state, RequestState):
        raise ValueError(
            f"import_request takes a RequestState, got {shown(state)}. Read one by "
            "RequestState.from_bytes, load or transfer.receive."
        )
    own = llm._runner.fingerprint
    if state.fingerprint != own:
        raise ValueError(
            "A request must go on with the model that it began with: its fingerprint is "
            f"{shown(state.fingerprint[:16])}..., and that of this engine's model and weights "
            f"{own[:16]!r}.... Load the same checkpoint in the same dtype."
        )
    sample = _resumed(llm, state)
    llm.session.check([sample])
    copied = _brought(llm, state, sample.request)
    llm._compile({sample.request.features})
    if copied is not None:
        _compile_copies(llm)
    return Stream(_stream(llm.session, sample, copied), state.request_id)


# Export


def _check_prefill(llm: Travels, request: Request) -> None:
    if not llm.limits.caches_prefixes:
        raise ValueError(
            "prefill keeps what it computes as a prefix until it is copied, and this engine keeps "
            "none. Set enable_prefix_caching=True, with a mamba_cache_mode other than 'none'."
        )
    if why_not := PrefixCache.why_not(request):
        raise ValueError(
            f"A request with {why_not} computes its whole prompt where it generates, so a prefill "
            "would be in vain. Send the prompt to the other engine."
        )


def _state_of(llm: Travels, sample: Sample, copied: Copied) -> RequestState:
    arrays = llm._runner.blocks.to_arrays(copied)
    return RequestState.of(sample.request, llm._runner.fingerprint, copied.num_tokens, arrays)


def _compile_copies(llm: Travels) -> None:
    """Compile the programs that copy blocks between the pools and the host, unless compiled."""
    llm.session.in_turn(lambda: _compile_in_turn(llm))


def _compile_in_turn(llm: Travels) -> None:
    llm.session.require_usable()
    if not llm.limits.caches_prefixes:
        return
    runner = llm._runner
    for program in of_blocks(runner.shapes):
        if not runner.is_warm(program):
            llm.session.guarded(lambda program=program: runner.warm_up(program))


# Import


def _resumed(llm: Travels, state: RequestState) -> Sample:
    """Recreate the sample at the exported position, validated like a new request."""
    if state.params.n > 1:
        raise ValueError(
            f"A request that travels must have one sample, got n={state.params.n}. Set n=1."
        )
    prompt = {"prompt_token_ids": list(state.prompt_token_ids), "cache_salt": state.cache_salt}
    params = dataclasses.replace(state.params, truncate_prompt_tokens=None)  # already truncated
    ((sample,),) = llm._inputs.process([prompt], [params], [state.request_id], state.priority)
    request, output = sample.request, state.token_ids
    check_ids("token_ids", output, llm._runner.shapes.vocab_size)
    request.seed = state.seed
    request.proposer_key = llm._inputs.proposer_key(request.prompt, state.seed)
    is_over = any(token in request.stop_ids for token in output[params.min_tokens :])
    room = request.max_len - len(request.prompt)
    if is_over or len(output) >= room:
        raise ValueError(
            f"A request that goes on must not have ended, and {shown(state.request_id)} has "
            f"{len(output)} of at most {room} tokens, or a stop id among them. Keep its text as it "
            "is, or raise max_model_len."
        )
    request.tokens.extend(output)
    request.draft_positions.extend(state.draft_positions)
    if state.logprobs is not None:
        request.logprobs.extend(state.logprobs)
    sample.resume()
    return sample


def _brought(llm: Travels, state: RequestState, request: Request) -> Copied | None:
    """Convert the state's arrays to blocks of this engine; None if the request would use none."""
    is_read = llm.limits.caches_prefixes and not PrefixCache.why_not(request)
    if not (is_read and state.num_computed):
        return None
    return llm._runner.blocks.from_arrays(state.arrays, request.tokens[: state.num_computed])


def _stream(
    session: Session, sample: Sample, copied: Copied | None
) -> Generator[TextDelta, None, None]:
    if copied is not None:
        session.bring(sample, copied)
    yield from session.stream(sample)
