"""Delays of a running engine's callers: programs that compile, and gaps in a stream."""

import collections
import threading
import time
from typing import Any, Self

import jax

from jaxspec import LLM, SamplingParams

SECONDS_TO_BEGIN = 120.0
IN_CALLS = "MainThread", "acceptance", "jaxspec-engine"  # threads in which a request waits


class CompileEvents:
    """Counts JAX's traces and compilations: those that a request waits for, and others."""

    def __init__(self) -> None:
        self._counts: collections.Counter[str] = collections.Counter()
        jax.monitoring.register_event_duration_secs_listener(self._listen)

    def close(self) -> None:
        jax.monitoring.unregister_event_duration_listener(self._listen)

    def take(self) -> dict[str, int]:
        """Return the counts since the last call."""
        counts, self._counts = self._counts, collections.Counter()
        return {name: counts[name] for name in ("compiled_in_calls", "compiled_in_background")}

    def _listen(self, event: str, duration: float, **_: object) -> None:
        del duration
        if event.startswith("/jax/core/compile/"):
            waits = threading.current_thread().name.startswith(IN_CALLS)
            self._counts["compiled_in_calls" if waits else "compiled_in_background"] += 1


class Companion:
    """A greedy stream in its own thread, and the largest gap between two of its outputs."""

    def __init__(self, llm: LLM, prompt: list[int], tokens: int):
        """`tokens`: of a request, after which the next one starts."""
        self._llm, self._prompt = llm, {"prompt_token_ids": prompt}
        self._params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        self._over, self._begun = threading.Event(), threading.Event()
        self._error: Exception | None = None
        self._gap = 0.0
        self._thread = threading.Thread(target=self._run, name="acceptance-companion")

    @property
    def largest_gap(self) -> float:
        """Seconds."""
        return self._gap

    def __enter__(self) -> Self:
        self._thread.start()
        self._begun.wait(SECONDS_TO_BEGIN)
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            while not self._over.is_set():
                self._stream()
        except Exception as error:
            self._error = error
        finally:
            self._begun.set()

    def _stream(self) -> None:
        with self._llm.stream(self._prompt, self._params) as pieces:
            last = None
            for _ in pieces:
                now = time.perf_counter()
                self._gap = max(self._gap, now - (last or now))
                last = now
                self._begun.set()
                if self._over.is_set():
                    return


def milliseconds(**seconds: float) -> dict[str, Any]:
    """Convert seconds by name to milliseconds by `name_ms`."""
    return {f"{name}_ms": 1000 * value for name, value in seconds.items()}
