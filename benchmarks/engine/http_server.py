"""A server that measures its host: `jaxspec serve` with programs for greedy requests alone.

The arguments of `main` are a model's folder and, as JSON, the options of an `AsyncLLM` and of the
server. The lines "begin" and "end" on the standard input bound a measurement, which "end" prints as
a line of JSON. "begin X" sets the milliseconds that a thread may keep Python's lock. The server
ends with that input.
"""

import asyncio
import json
import os
import signal
import sys
import threading
import time
from typing import Any

import uvloop

from benchmarks.measure.host_times import HostWatch
from jaxspec.api.async_llm import AsyncLLM
from jaxspec.server.options import ServerOptions
from jaxspec.server.run import serve

TICK = 0.005  # seconds between two looks at the event loop


class WatchedLLM(AsyncLLM):
    """An AsyncLLM that compiles for greedy requests and measures its host."""

    async def get_ready(self) -> None:
        began = time.monotonic()
        await self.warm_up(["greedy"])
        self._compile_seconds = time.monotonic() - began
        self._lags: list[float] = []
        self._ticking = asyncio.create_task(self._tick())
        threading.Thread(target=self._listen, daemon=True).start()

    async def _tick(self) -> None:
        """Record the lag of the event loop."""
        while True:
            due = time.monotonic() + TICK
            await asyncio.sleep(TICK)
            self._lags.append(time.monotonic() - due)

    def _listen(self) -> None:
        watch = HostWatch(self._engine.session.engine)
        try:
            for line in sys.stdin:
                command, *milliseconds = line.split()
                if command == "begin":
                    if milliseconds:
                        sys.setswitchinterval(float(milliseconds[0]) / 1000)
                    self._lags = []
                    watch.begin()
                else:
                    print(json.dumps({**watch.end(), **self._about()}), flush=True)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    def _about(self) -> dict[str, Any]:
        metrics = self.metrics()
        same = ("implementations", "num_preemptions", "num_running", "num_waiting")
        told = {name: metrics[name] for name in same}
        told["switch_ms"] = 1000 * sys.getswitchinterval()
        return {**told, "lags": self._lags, "compile_seconds": self._compile_seconds}


def main() -> None:
    folder, llm_options, server_options = sys.argv[1], *map(json.loads, sys.argv[2:])
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        serving = serve(lambda: WatchedLLM(folder, **llm_options), ServerOptions(**server_options))
        sys.exit(runner.run(serving))
