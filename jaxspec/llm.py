"""Text in, text out: calls that wait, in the thread that makes them."""

import contextlib
from collections.abc import Sequence
from typing import Unpack

from jaxspec import progress_bar, travelling
from jaxspec.beam_search import beam_search as _beam_search
from jaxspec.conversations import Messages, TemplateOptions
from jaxspec.llm_engine import LLMEngine
from jaxspec.options import SIGNATURE, listing
from jaxspec.outputs import RequestOutput, Stream
from jaxspec.per_prompt import params_of
from jaxspec.prompts import Prompt, parts_of, prompts_of
from jaxspec.sampling_params import SamplingParams
from jaxspec.score import score as _score

Params = SamplingParams | Sequence[SamplingParams] | None


class LLM(LLMEngine):
    """A model, its engine and its tokenizer; several threads may call it at once.

    `close` gives the device's memory back, as does the end of a `with` block.

    Raises:
        FileNotFoundError: no such model, or a folder without configuration or weights.
        TypeError: there is no such option.
        ValueError: an option, the configuration or the weights break a rule, or do not fit.
        RuntimeError: this is a forked child of a process that made an LLM.
    """

    __signature__ = SIGNATURE

    def __enter__(self) -> "LLM":
        """The LLM itself."""
        return self

    def __exit__(self, *error: object) -> None:
        """Close it."""
        self.close()

    def abort(self, request_id: str) -> None:
        """End every sample of the requests of this id that are queued, with "abort".

        Any thread may call it, while others wait in `generate` or read a stream. A request that has
        ended, or never was, is passed over.
        """
        self.session.require_usable()
        self.session.abort(str(request_id))

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params = None,
        *,
        use_tqdm: progress_bar.Bar = None,
        priority: int | Sequence[int] | None = None,
        request_ids: Sequence[str] | None = None,
    ) -> list[RequestOutput]:
        """Complete prompts; outputs in their order.

        A prompt is a text, a list of token ids, or a dict: `TextPrompt` or `TokensPrompt`.

        `sampling_params`: one for all or one each; None: `get_default_sampling_params()`.
        `use_tqdm`: whether a bar is drawn, or a tqdm class to draw it; None: as `show_progress`.
        `priority`: one for all or one each; of the requests that wait, those with lower numbers
        enter first, and among equals those that came first; None: 0.
        `request_ids`: a name for each prompt, which `abort` takes; None: numbers.

        Raises:
            ValueError: a prompt or parameter breaks a rule. Nothing is queued then.
            RuntimeError: the LLM is closed, or this is a forked child of its process.
        """
        self.session.require_usable()
        progress_bar.check(use_tqdm)
        batch = prompts_of(prompts)
        params = params_of(sampling_params, len(batch), self._default_params)
        groups = self.prepare(batch, params, request_ids, priority)
        samples = [sample for group in groups for sample in group]
        with (
            progress_bar.open_bar(use_tqdm, len(samples), is_shown=self._show_progress) as bar,
            contextlib.closing(self.session.run(samples)) as run,
        ):
            for left in run:
                progress_bar.move(bar, samples, len(left))
        return [
            RequestOutput.of(parts_of(prompt).text, group)
            for prompt, group in zip(batch, groups, strict=True)
        ]

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        priority: int = 0,
        request_id: str | None = None,
    ) -> Stream:
        """The pieces of a prompt's samples as they come. The first `next` queues it.

        A piece names its sample in `index`; `SamplingParams.output_kind` says what it holds.
        `with llm.stream(...) as pieces:` ends the request when the block is left early.

        Raises:
            ValueError: as in `generate`, and for several prompts.
            RuntimeError: as in `generate`.
        """
        only = self.one_prompt(prompt)
        samples = self.prepare_one(only, sampling_params, request_id, priority)
        return Stream(self.session.stream(*samples), samples[0].request_id)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: Params = None,
        *,
        use_tqdm: progress_bar.Bar = None,
        priority: int | Sequence[int] | None = None,
        request_ids: Sequence[str] | None = None,
        **template: Unpack[TemplateOptions],
    ) -> list[RequestOutput]:
        """Complete one conversation or several, written out by the checkpoint's chat template.

        A message is `{"role": ..., "content": ...}`. A content is a text or a list of parts, each
        `{"type": "text", "text": ...}`.

        `template`, all by name: `chat_template`, the text of another template or the name of one
        that the checkpoint has; `chat_template_kwargs`, a dict of the template's own switches, such
        as `{"enable_thinking": False}`; `tools`, a list of tools in JSON's values;
        `add_generation_prompt` (True), whether the text ends where the assistant begins to speak;
        `continue_final_message` (False), whether it ends with the last message, for which
        `add_generation_prompt` must be False. The others are as in `generate`.

        Raises:
            TypeError: there is no such argument.
            ValueError: no tokenizer or template, or one it refuses; and as in `generate`.
            RuntimeError: as in `generate`.
        """
        self.session.require_usable()
        prompts = self._inputs.chats(messages, template)
        return self.generate(
            prompts,
            sampling_params,
            use_tqdm=use_tqdm,
            priority=priority,
            request_ids=request_ids,
        )

    beam_search, score = _beam_search, _score
    export_request, prefill = travelling.export_request, travelling.prefill
    import_request = travelling.import_request

    def stream_chat(
        self,
        messages: Messages,
        sampling_params: SamplingParams | None = None,
        *,
        priority: int = 0,
        request_id: str | None = None,
        **template: Unpack[TemplateOptions],
    ) -> Stream:
        """The pieces of a conversation's next message as they come: `stream` for a `chat`.

        Raises:
            TypeError, ValueError, RuntimeError: as in `chat` and `stream`.
        """
        prompt = self.chat_prompt(messages, template)
        return self.stream(prompt, sampling_params, priority=priority, request_id=request_id)


LLM.__doc__ = f"{LLM.__doc__}\n    Args:\n{listing()}\n"
