"""Copies of routed experts are counted while other threads make more of them."""

import sys
from types import SimpleNamespace

import numpy as np
import pytest
from threads import in_threads

from jaxspec.engine.metrics import HOST_BYTES
from jaxspec.runner import page_reader
from jaxspec.runner.page_reader import RouteRecorder

PAGE_SIZE = 4


class FakeReader:
    """Pages of one byte per token."""

    page_size = PAGE_SIZE

    def __init__(self, *runner_and_pool):
        """Compile nothing."""

    def read(self, pages):
        return [np.zeros((len(pages), PAGE_SIZE, 1, 1), np.uint8)]


@pytest.fixture
def impatient():
    """Threads take turns after microseconds."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def ended(num_tokens):
    """A request that leaves its row."""
    tokens, pages = [7] * num_tokens, [*range(1, num_tokens)]
    return SimpleNamespace(
        is_prefilling=False, finish=True, tokens=tokens, pages=pages, first_route=0, routes=None
    )


def test_metrics_count_bytes_while_requests_end(monkeypatch, impatient):
    """A thread that reads metrics does not fail because the engine's thread copies pages."""
    monkeypatch.setattr(page_reader, "PageReader", FakeReader)
    recorder, kept, num_copied, is_read = RouteRecorder(None), [], [0], []

    def copy():
        while not is_read:
            kept.append(ended(9))
            recorder.leave(kept[-1])
            num_copied[0] += 1
            del kept[:-100]

    def read():
        try:
            while num_copied[0] < 300:
                found = recorder.stats()[HOST_BYTES]
                assert found % (2 * PAGE_SIZE) == 0
        finally:
            is_read.append(True)

    in_threads(copy, read)
    del kept[:-3]
    assert recorder.stats() == {HOST_BYTES: 3 * 2 * PAGE_SIZE}
