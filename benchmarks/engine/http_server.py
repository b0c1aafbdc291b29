"""A server that tells what its host does: `jaxspec serve`, but for what it compiles at the start.

`main` takes a model's folder and the options of an `AsyncLLM` and of the server in JSON. "begin"
and "end" on the standard input bound what is measured, and "end" is answered with a line of JSON.
Behind "begin" may stand for how many milliseconds a thread keeps Python's lock from then on, in
place of what the server chose. The server ends with that input.
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
    """It compiles for greedy requests, and tells what its host does."""

    async def get_ready(self) -> None:
        began = time.monotonic()
        await self.warm_up(["greedy"])
        self._compile_seconds = time.monotonic() - began
        self._lags: list[float] = []
        self._ticking = asyncio.create_task(self._tick())
        threading.Thread(target=self._listen, daemon=True).start()

    async def _tick(self) -> None:
        """Note how late the loop comes to what is due."""
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
