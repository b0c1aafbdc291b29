"""A line in the log every few seconds while requests run: tokens per second and cache use."""

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator

from jaxspec.api.async_llm import AsyncLLM
from jaxspec.engine.metrics import EngineSnapshot
from jaxspec.server.options import ServerOptions

_SECONDS = 10.0


class ThroughputLog:
    """Rates between two looks at an engine's counters."""

    def __init__(self, snapshot: EngineSnapshot):
        """Start from the counters of `snapshot`."""
        self._was_idle = True
        self._before, self._at = _counts(snapshot), time.monotonic()

    def line(self, snapshot: EngineSnapshot) -> str | None:
        """Return the line for the time since the last call; None if no request ran in it.

        A last line follows when all requests have ended.
        """
        metrics, counts, now = snapshot.engine, _counts(snapshot), time.monotonic()
        seconds, before = max(now - self._at, 1e-9), self._before
        since = {name: count - before[name] for name, count in counts.items()}
        self._before, self._at = counts, now
        is_idle = not (metrics["num_running"] or metrics["num_waiting"])
        was_idle, self._was_idle = self._was_idle, is_idle
        if is_idle and was_idle and not since["tokens"]:
            return None
        parts = [
            f"prompts {since['prompt_tokens'] / seconds:.1f} tokens/s",
            f"outputs {since['tokens'] / seconds:.1f} tokens/s",
            f"running {metrics['num_running']}",
            f"waiting {metrics['num_waiting']}",
            f"KV cache {metrics['kv_cache_usage']:.1%}",
        ]
        if since["queries"]:
            parts.append(f"prefix cache hits {since['hits'] / since['queries']:.1%}")
        if since["drafts"]:
            parts.append(f"acceptance length {1 + since['accepted'] / since['drafts']:.2f}")
        return "Engine: " + ", ".join(parts)


def _counts(snapshot: EngineSnapshot) -> dict[str, float]:
    values = {metric.name: getattr(metric, "value", 0) for metric in snapshot.by_vllm}
    return {
        "prompt_tokens": snapshot.engine["num_prompt_tokens"],
        "tokens": values["vllm:generation_tokens"],
        "queries": values["vllm:prefix_cache_queries"],
        "hits": values["vllm:prefix_cache_hits"],
        "drafts": values["vllm:spec_decode_num_drafts"],
        "accepted": values["vllm:spec_decode_num_accepted_tokens"],
    }


@contextlib.contextmanager
def logging_throughput(
    llm: AsyncLLM,
    options: ServerOptions,
    log: Callable[[str], object],
    seconds: float = _SECONDS,
) -> Iterator[None]:
    """Call `log` with the line every `seconds` within the context, unless the option is off."""
    task = asyncio.ensure_future(_log(llm, log, seconds)) if options.throughput_log else None
    try:
        yield
    finally:
        if task is not None:
            task.cancel()


async def _log(llm: AsyncLLM, log: Callable[[str], object], seconds: float) -> None:
    throughput: ThroughputLog | None = None
    while llm.is_healthy:
        with contextlib.suppress(RuntimeError):  # the engine was closed meanwhile
            snapshot = await llm.snapshot()
            if throughput is None:
                throughput = ThroughputLog(snapshot)
            elif (line := throughput.line(snapshot)) is not None:
                log(line)
        await asyncio.sleep(seconds)
