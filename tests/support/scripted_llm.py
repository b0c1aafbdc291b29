"""What stands for an AsyncLLM in tests of the server: it says what a script says."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

from jaxspec.api.loading import EMBEDDED_MODEL
from jaxspec.requests.outputs import TextDelta
from jaxspec.requests.request import RequestMetrics
from jaxspec.requests.sampling_params import SamplingParams
from jaxspec.text.tokenizer import Tokenizer


class ScriptedStream:
    """Pieces of a text, one a time."""

    def __init__(self, prompt: str, ids: Sequence[int], pieces: Sequence[str], reason: str):
        self.prompt, self.prompt_token_ids = prompt, list(ids)
        self.num_cached_tokens, self.request_id, self.prompt_logprobs = 0, "", None
        self._pieces = [TextDelta(text=text, token_ids=[1], draft_positions=[0]) for text in pieces]
        self._pieces.append(
            TextDelta(text="", token_ids=[], finish_reason=reason, metrics=RequestMetrics())
        )
        self.is_closed = False

    def __aiter__(self):
        return self

    async def __anext__(self) -> TextDelta:
        await asyncio.sleep(0)
        if not self._pieces:
            raise StopAsyncIteration
        return self._pieces.pop(0)

    async def aclose(self) -> None:
        self.is_closed = True


class ScriptedLLM:
    """Answers every request with the same pieces; `asked` keeps what the last chat was."""

    model_name, max_model_len = "scripted", 4096
    num_running = num_waiting = 0
    is_healthy, error, num_replicas = True, None, 1
    is_ready = property(lambda self: self.is_healthy)

    def __init__(self, pieces: Sequence[str], template: str, reason: str = "stop"):
        self.pieces, self.reason = pieces, reason
        self.tokenizer = TemplateTokenizer(EMBEDDED_MODEL, template)
        self.asked: dict = {}
        self.salt: str | None = None
        self.params: SamplingParams | None = None

    async def submit_chat(
        self,
        messages,
        sampling_params=None,
        *,
        request_id=None,
        priority=0,
        cache_salt=None,
        **template,
    ):
        self.salt = cache_salt
        self.asked = {"messages": messages, **template}
        self.params = sampling_params
        text = self.tokenizer.render_chat(messages, **template)
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        return ScriptedStream(text, ids, self.pieces, self.reason)

    async def submit(self, prompt, sampling_params=None, *, request_id=None, priority=0):
        self.asked, self.params = {"prompt": prompt}, sampling_params
        ids = prompt if isinstance(prompt, list) else self.tokenizer.encode(prompt)
        return ScriptedStream(str(prompt), ids, self.pieces, self.reason)

    async def prepare(self, call, *, is_long=False):
        return call()

    def get_default_sampling_params(self) -> SamplingParams:
        return SamplingParams(temperature=0.0)

    async def get_ready(self) -> None:
        pass

    async def close(self) -> None:
        pass

    async def __aenter__(self):
        return self

    async def __aexit__(self, *error) -> None:
        await self.close()


class TemplateTokenizer(Tokenizer):
    """The embedded model's tokenizer with another chat template."""

    def __init__(self, folder: Path, template: str):
        super().__init__(folder)
        self._template = template

    @property
    def chat_template(self) -> str:
        return self._template

    def _render(self, *given, chat_template=None, **options):
        return super()._render(*given, chat_template=chat_template or self._template, **options)
