"""Requests that travel: out of an engine with what was computed of them, and on in another one."""

import dataclasses
from collections.abc import Generator
from typing import Any, Protocol

from jaxspec.checks import shown
from jaxspec.handover import RequestState
from jaxspec.inputs import InputProcessor
from jaxspec.outputs import Sample, Stream, TextDelta
from jaxspec.piece_plan import Copied
from jaxspec.prompts import Prompt
from jaxspec.request import Request
from jaxspec.runner.model_runner import ModelRunner
from jaxspec.runner.portable_pieces import arrays_of, copied_of
from jaxspec.runner.warmup import of_pieces
from jaxspec.sampler import Sampler
from jaxspec.sampling_params import SamplingParams
from jaxspec.scheduler.prefix_cache import PrefixCache
from jaxspec.session import Session
from jaxspec.token_checks import check_ids


class Travels(Protocol):
    """The part of an `LLM` that is needed here."""

    session: Session
    _inputs: InputProcessor
    _runner: ModelRunner

    def one_prompt(self, prompt: Any, call: str, /) -> Any:
        """See `LLMEngine`."""
        ...

    def prepare_one(self, prompt: Any, params: Any, request_id: Any, priority: Any, /) -> Any:
        """See `LLMEngine`."""
        ...

    def _compile(self, samplers: set[Sampler], /) -> None: ...


def export_request(llm: Travels, request_id: str) -> RequestState:
    """Take a request out of this engine, with what was computed of it; here it ends with "abort".

    Whoever reads it here gets all tokens that go with it, and whoever imports it those that follow.
    Any thread may call, while others wait in `generate` or read the stream. A request that runs is
    exported when the steps in flight for it are over.

    Raises:
        ValueError: no request of this id runs or waits, or it has several samples.
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
    """Compute a prompt but for its last token, for another engine that goes on by `import_request`.

    That engine computes the last token itself: scores, noise and drafts are its own. Arguments are
    as in `stream`.

    `num_computed` of the state tells how many tokens came along. They may be fewer than all but the
    last, even none: with `mamba_cache_mode="align"`, where no slot was free for a state at the end,
    or where others have taken what was kept meanwhile.

    Raises:
        ValueError: as in `stream`; n above 1; the engine keeps no prefixes; or parameters whose
            requests use none (penalties, `prompt_logprobs`).
        RuntimeError: as in `generate`, or `abort` came first.
    """
    only = llm.one_prompt(prompt, "prefill")
    sample, *others = llm.prepare_one(only, sampling_params, request_id, priority)
    if others:
        count = 1 + len(others)
        raise ValueError(f"prefill takes a request of one sample, got n={count}. Set n=1.")
    request, session = sample.request, llm.session
    _check_prefill(llm, request)
    if len(request.prompt) == 1:  # and so its last one
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
    """Go on with a request that left another engine: the pieces of what follows its output so far.

    The first `next` queues it. It goes on from what came with it, as from a prefix that was found
    here. Where that is of no use, it is computed anew, and its tokens are the same.

    Raises:
        ValueError: the request was made for another model, other weights or dtypes; it has ended,
            does not fit, or has several samples; or a parameter breaks a rule here. Nothing is
            queued then.
        RuntimeError: as in `generate`.
    """
    llm.session.require_usable()
    if not isinstance(state, RequestState):
        raise ValueError(
            f"import_request takes a RequestState, got {shown(state)}. Read one by "
            "RequestState.from_bytes, load or handover.receive."
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
    llm._compile({sample.request.sampler})
    if copied is not None:
        _compile_copies(llm)
    return Stream(_stream(llm.session, sample, copied), state.request_id)


# What leaves.


def _check_prefill(llm: Travels, request: Request) -> None:
    if llm._runner.shapes.prefix_caching == "off":
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
    arrays = arrays_of(llm._runner, copied)
    return RequestState.of(sample.request, llm._runner.fingerprint, copied.num_tokens, arrays)


def _compile_copies(llm: Travels) -> None:
    """Compile what copies between the pools and the host, unless that is done."""
    llm.session.in_turn(lambda: _compile_in_turn(llm))


def _compile_in_turn(llm: Travels) -> None:
    llm.session.require_usable()
    runner = llm._runner
    if runner.shapes.prefix_caching == "off":
        return
    for program in of_pieces(runner.shapes):
        if not runner.is_warm(program):
            llm.session.guarded(lambda program=program: runner.warm_up(program))


# What arrives.


def _resumed(llm: Travels, state: RequestState) -> Sample:
    """A sample that stands where the request stood, held against all rules of a new one."""
    if state.params.n > 1:
        raise ValueError(
            f"A request that travels must have one sample, got n={state.params.n}. Set n=1."
        )
    prompt = {"prompt_token_ids": list(state.prompt_token_ids), "cache_salt": state.cache_salt}
    params = dataclasses.replace(state.params, truncate_prompt_tokens=None)  # it is truncated
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
    """What came with a request, for this engine's pools; None: nothing that it would read."""
    is_read = llm._runner.shapes.prefix_caching != "off" and not PrefixCache.why_not(request)
    if not (is_read and state.num_computed):
        return None
    return copied_of(llm._runner, state.arrays, request.tokens[: state.num_computed])


def _stream(
    session: Session, sample: Sample, copied: Copied | None
) -> Generator[TextDelta, None, None]:
    if copied is not None:
        session.bring(sample, copied)
    yield from session.stream(sample)
