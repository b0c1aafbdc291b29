"""What stands for an AsyncLLM behind the page: its answers may hang, fail, and hold HTML."""

import asyncio
import contextlib
from collections.abc import Sequence
from types import SimpleNamespace

from scripted_llm import ScriptedLLM, ScriptedStream

from jaxspec.engine.errors import EngineDeadError
from jaxspec.engine.metrics import EngineSnapshot
from jaxspec.requests.outputs import TextDelta

FAILS, HANGS = "the step fails", "the model hangs"
_TEMPLATE = "{{ messages[-1]['content'] }}</think>"
_FIGURES = {
    "num_tokens": 0,
    "num_running": 0,
    "num_waiting": 0,
    "kv_cache_usage": 0.0,
    "acceptance": {"mtp": {"drafted_per_position": [4, 4], "accepted_per_position": [3, 1]}},
    "memory_bytes": {"weights": 3000, "kv": 1000},
}


class PageStream(ScriptedStream):
    """A scripted stream of tokens, the n-th of which is from draft n modulo 4."""

    def __init__(self, prompt: str, tokenizer, pieces: Sequence[str]):
        super().__init__(prompt, [1], [], "stop")
        self._last: TextDelta | None = self._pieces.pop()
        ids = [tokenizer.encode(text, add_special_tokens=False) for text in pieces]
        self._pieces = [
            TextDelta(text, tokens, draft_positions=[i % 4 for i in range(len(tokens))])
            for text, tokens in zip(pieces, ids, strict=True)
        ]

    async def __anext__(self) -> TextDelta:
        await asyncio.sleep(0)
        if self._pieces:
            return self._pieces.pop(0)
        if self.prompt.startswith(FAILS):
            raise EngineDeadError(ValueError("planted"))
        while self.prompt.startswith(HANGS):
            await asyncio.sleep(3600)
        if self._last is None:
            raise StopAsyncIteration
        last, self._last = self._last, None
        return last


class PageLLM(ScriptedLLM):
    """Answers with the same pieces, unless a message asks for something else."""

    shapes = SimpleNamespace(max_num_seqs=8, num_pages=257, page_size=16)

    def __init__(self, pieces: Sequence[str]):
        super().__init__(pieces, _TEMPLATE)
        self.streams: list[PageStream] = []

    async def submit_chat(self, messages, *args, **options):
        await super().submit_chat(messages, *args, **options)
        prompt = str(messages[-1]["content"])
        self.streams.append(PageStream(prompt, self.tokenizer, self.pieces))
        return self.streams[-1]

    async def snapshot(self) -> EngineSnapshot:
        return EngineSnapshot(_FIGURES, [])

    @contextlib.contextmanager
    def trace(self):
        yield []
