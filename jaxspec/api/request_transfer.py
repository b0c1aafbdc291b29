"""Request migration: export a request with its computed prefix, and continue it elsewhere.

`export_request` takes a running request out of an engine, `prefill` computes only a prompt, and
`import_request` continues either in another engine with the same model.
"""

import dataclasses
from collections.abc import Generator

from jaxspec.api.inputs import check_ids
from jaxspec.api.llm_engine import LLMEngine
from jaxspec.checks import shown
from jaxspec.engine.session import Session
from jaxspec.plan.block_plan import Copied
from jaxspec.prefix.cache import PrefixCache
from jaxspec.requests.outputs import Sample, Stream, TextDelta
from jaxspec.requests.prompts import Prompt
from jaxspec.requests.request import Request
from jaxspec.requests.sampling_params import SamplingParams
from jaxspec.runner.warmup import of_blocks
from jaxspec.transfer import RequestState


class TransferEngine(LLMEngine):
    """An `LLMEngine` whose requests can continue in another engine."""

    def export_request(self, request_id: str) -> RequestState:
        """Abort a request and return its state, to be continued by another engine.

        Its output here ends with "abort" and has all tokens of the exported state; the importing
        engine returns those that follow. Any thread may call it while others wait in `generate` or
        read the stream. It waits for the steps in flight for the request.

        Args:
            request_id: Id of the request.

        Returns:
            The state of the request, with a copy of its computed prefix.

        Raises:
            ValueError: no running or waiting request has this id, or it has several samples.
            RuntimeError: as in `generate`.
        """
        self.session.require_usable()
        self.session.gate.check_awake()
        self._check_nodes()
        name = str(request_id)
        samples = self.session.of_request(name)
        if len(samples) != 1 or samples[0].request.params.n > 1:
            raise ValueError(
                "export_request takes the id of a request that runs or waits and has one sample, "
                f"and {shown(name)} has {len(samples)} samples here. Give each sample a request of "
                "its own (n=1) with another id."
            )
        self._compile_copies()
        weights = self._weights_now()
        copied = self.session.withdraw(samples[0])
        if copied is None:
            raise ValueError(
                f"export_request takes the id of a request that runs or waits, and {shown(name)} "
                "has just ended. Its output is whole."
            )
        return self._state_of(samples[0], copied, weights)

    def prefill(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        priority: int = 0,
        request_id: str | None = None,
    ) -> RequestState:
        """Compute a prompt except its last token, for `import_request` of another engine.

        That engine computes the last token, and so its logits, noise and drafts.

        Args:
            prompt: A prompt as in `stream`.
            sampling_params: As in `stream`.
            priority: As in `stream`.
            request_id: As in `stream`.

        Returns:
            The state of the request. Its `num_computed` is the number of tokens included, normally
            the prompt's less one. It is smaller, or even 0, with `mamba_cache_mode="align"`, if no
            checkpoint slot was free for the state at the end, or if the cached prefix was evicted
            before the copy.

        Raises:
            ValueError: `n` is above 1, the engine caches no prefixes, the parameters rule out
                cached prefixes (penalties, `prompt_logprobs`), or as in `stream`.
            RuntimeError: the request was aborted or failed, or as in `generate`.
        """
        self.session.require_usable()
        self.session.gate.check_awake()
        self._check_nodes()
        sample, *others = self.inputs.process_one(
            prompt, sampling_params, request_id, priority, call="prefill"
        )
        if others:
            count = 1 + len(others)
            raise ValueError(f"prefill takes a request of one sample, got n={count}. Set n=1.")
        request, session = sample.request, self.session
        self._check_prefill(request)
        self.admit([sample])
        if len(request.prompt) == 1:  # only the last token, so there is nothing to compute
            return self._state_of(sample, Copied(0), self._weights_now())
        request.is_prefill_only = True
        self._compile_copies()
        try:
            session.add([sample])
            while not request.finish:
                session.step()
            weights = self._weights_now()
            copied = session.withdraw(sample)
        finally:
            session.abort([sample])
        if copied is None or request.num_computed < len(request.prompt) - 1:
            raise RuntimeError(
                f"Request {shown(sample.request_id)} ended with {request.finish.reason!r} before "
                "its prompt was computed. Call prefill again."
            )
        return self._state_of(sample, copied, weights)

    def import_request(self, state: RequestState) -> Stream:
        """Continue a request exported by another engine.

        The request is checked at once and queued at the first `next`. Its computed prefix is used
        like a cached prefix of this engine; without it the prefix is computed again, and the tokens
        are the same.

        Args:
            state: State of the request, from `export_request` or `prefill`.

        Returns:
            An iterator over the deltas that follow the exported output.

        Raises:
            ValueError: the state belongs to another model, other weights or another dtype; the
                request has finished, does not fit, or has several samples; or a parameter is
                invalid here. Nothing is queued.
            RuntimeError: as in `generate`.
        """
        self.session.require_usable()
        self.session.gate.check_awake()
        self._check_nodes()
        if not isinstance(state, RequestState):
            raise ValueError(
                f"import_request takes a RequestState, got {shown(state)}. Read one by "
                "RequestState.from_bytes, load or transfer.receive."
            )
        version, own = self.weight_version, self._runner.fingerprint
        if state.fingerprint != own:
            raise ValueError(
                "A request must go on with the model that it began with: its fingerprint is "
                f"{shown(state.fingerprint[:16])}..., and that of this engine's model and weights "
                f"{own[:16]!r}.... Load the same checkpoint in the same dtype, and with "
                "quantization='dequantise' if weights stay in 8 or 4 bits on one engine alone."
            )
        sample = self._resumed(state)
        self.admit([sample])
        copied = self._brought(state, sample.request)
        if copied is not None:
            self._compile_copies()
        return Stream(_stream(self.session, sample, copied, version), state.request_id)

    # Export

    def _check_nodes(self) -> None:
        if (count := self._runner.group.nodes) > 1:
            raise ValueError(
                f"Requests migrate between engines of one process each, and this one has {count} "
                "nodes. Use nnodes=1 on both sides."
            )

    def _check_prefill(self, request: Request) -> None:
        if not self.limits.caches_prefixes:
            raise ValueError(
                "prefill caches the prefix that it computes until it is copied, and this engine "
                "caches none. Set enable_prefix_caching=True, with a mamba_cache_mode other than "
                "'none'."
            )
        if why_not := PrefixCache.why_not(request):
            raise ValueError(
                f"A request with {why_not} computes its whole prompt where it generates, so a "
                "prefill would have no effect. Send the prompt to the other engine."
            )

    def _weights_now(self) -> tuple[str, str]:
        """Return the version and the fingerprint of the weights; `sleep` may free them later."""
        return self.weight_version, self._runner.fingerprint

    def _state_of(
        self, sample: Sample, copied: Copied, weights_before: tuple[str, str]
    ) -> RequestState:
        """Return the state; its arrays are dropped if weights were of another version before."""
        arrays = self._runner.portable.to_arrays(copied)
        version, fingerprint = weights_before
        if version != self.weight_version:  # updated meanwhile: the copy is of either
            arrays, copied, fingerprint = {}, Copied(0), self._runner.fingerprint
        return RequestState.of(sample.request, fingerprint, copied.num_tokens, arrays)

    def _compile_copies(self) -> None:
        """Compile the programs that copy blocks between the pools and the host, unless compiled."""
        self.session.in_turn(self._compile_copies_in_turn)

    def _compile_copies_in_turn(self) -> None:
        self.session.require_usable()
        self.session.gate.check_awake()
        self._check_nodes()
        runner = self._runner
        if not self.limits.caches_prefixes:
            return
        for program in of_blocks(runner.shapes):
            if not runner.is_warm(program):
                self.session.guarded(lambda program=program: runner.warm_up(program))

    # Import

    def _resumed(self, state: RequestState) -> Sample:
        """Recreate the sample at the exported position, validated like a new request."""
        if state.params.n > 1:
            raise ValueError(
                f"A request that travels must have one sample, got n={state.params.n}. Set n=1."
            )
        prompt = {"prompt_token_ids": list(state.prompt_token_ids), "cache_salt": state.cache_salt}
        params = dataclasses.replace(state.params, truncate_prompt_tokens=None)  # already truncated
        ((sample,),) = self.inputs.process([prompt], [params], [state.request_id], state.priority)
        request, output = sample.request, state.token_ids
        check_ids("token_ids", output, self._runner.shapes.vocab_size)
        request.seed = state.seed
        is_over = any(token in request.stop_ids for token in output[params.min_tokens :])
        room = request.max_len - len(request.prompt)
        if is_over or len(output) >= room:
            raise ValueError(
                f"A request that goes on must not have ended, and {shown(state.request_id)} has "
                f"{len(output)} of at most {room} tokens, or a stop id among them. Keep its text "
                "as it is, or raise max_model_len."
            )
        request.tokens.extend(output)
        request.draft_positions.extend(state.draft_positions)
        request.weight_starts.extend(state.weight_starts)
        if state.logprobs is not None:
            request.logprobs.extend(state.logprobs)
        sample.resume()
        return sample

    def _brought(self, state: RequestState, request: Request) -> Copied | None:
        """Convert the state's arrays to blocks of this engine; None if it would use none."""
        is_read = self.limits.caches_prefixes and not PrefixCache.why_not(request)
        if not (is_read and state.num_computed):
            return None
        return self._runner.portable.from_arrays(state.arrays, request.tokens[: state.num_computed])


def _stream(
    session: Session, sample: Sample, copied: Copied | None, weight_version: str
) -> Generator[TextDelta, None, None]:
    if copied is not None:
        session.bring(sample, copied, weight_version)
    yield from session.stream(sample)
