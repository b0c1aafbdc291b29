"""Process checks: JAX hangs in forked children, so they get an error instead."""

import functools
import os


def check_process(owner: int) -> None:
    """Raise RuntimeError unless this is the process with id `owner`, where JAX has its threads."""
    if os.getpid() != owner:
        raise RuntimeError(
            f"An LLM works only in the process that made it, {owner}, and this is {os.getpid()}, "
            "forked from it: threads of JAX do not survive a fork. Make the LLM in the child, "
            "which must be started with multiprocessing's 'spawn'."
        )


@functools.cache
def first_process() -> int:
    """Return the id of the process that created the first LLM, where JAX has its threads."""
    return os.getpid()
