"""Forked children: JAX does not work in them, so they get an error in place of a hang."""

import functools
import os


def check_process(owner: int) -> None:
    """Refuse to run JAX in a forked child of the process `owner`, where it would hang.

    Raises:
        RuntimeError: this is another process.
    """
    if os.getpid() != owner:
        raise RuntimeError(
            f"An LLM works only in the process that made it, {owner}, and this is {os.getpid()}, "
            "forked from it: threads of JAX do not survive a fork. Make the LLM in the child, "
            "which must be started with multiprocessing's 'spawn'."
        )


@functools.cache
def first_process() -> int:
    """The process in which the first LLM was made, by which JAX has threads."""
    return os.getpid()
