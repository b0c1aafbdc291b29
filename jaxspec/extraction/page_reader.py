"""PageReader: pages of a pool, copied to the host in the order of the device's work."""

from collections.abc import Sequence

import jax
import numpy as np
from jaxtyping import Array, Float, Int

from jaxspec.runner.model_runner import ModelRunner

_TOKENS = 256  # of a copy: all lengths take one program, and the device has room for a copy more

Pages = Float[Array, "pages page_size features"]


class PageReader:
    """Reads one pool of a runner, an array whose first axis are pages.

    A copy is enqueued behind the steps that were dispatched, and before those that come. So it has
    what they left in the pages, whoever gets the pages next. Nobody waits for it here.
    """

    def __init__(self, runner: ModelRunner, pool: str):
        """Compile the copy, and run it once, for a GPU loads it then: nothing is made later."""
        self._runner, self._pool = runner, pool
        self.page_size = runner.shapes.page_size
        self._num_pages = max(1, _TOKENS // self.page_size)
        pages = np.zeros(self._num_pages, np.int32)
        self._copy = jax.jit(_copy).lower(runner.state.pools[pool], pages).compile()
        self.read([0])

    def read(self, pages: Sequence[int]) -> list[Pages]:
        """Copies of `pages`, end to end; behind them the last copy has the null page."""
        pool, size = self._runner.state.pools[self._pool], self._num_pages
        copies = []
        for first in range(0, len(pages), size):
            some = np.zeros(size, np.int32)
            some[: len(pages) - first] = pages[first : first + size]
            copies.append(self._copy(pool, some))
        return copies


def _copy(pool: Pages, pages: Int[Array, " pages"]) -> Pages:
    # Into pinned host memory, as a step's output goes: however long a request is, the device holds
    # no more than one copy of it at a time.
    return jax.device_put(pool[pages], jax.memory.Space.Host)
