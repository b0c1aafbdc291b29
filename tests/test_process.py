"""In which process JAX may run."""

import os

import pytest

from jaxspec.process import check_process, first_process


def test_another_process_is_told_who_may_run_and_how_to_start():
    check_process(os.getpid())
    assert first_process() == os.getpid()
    with pytest.raises(
        RuntimeError, match=f"made it, 1, and this is {os.getpid()}, forked .*spawn"
    ):
        check_process(1)
