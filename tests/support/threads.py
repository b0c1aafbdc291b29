"""Several calls at once, for tests of what threads may do; one that hangs fails its test."""

import threading
from collections.abc import Callable
from typing import Any


def in_threads(*calls: Callable[[], Any], seconds: float = 120) -> list[Any]:
    """What each call returned, each made in a thread of its own; raises what the first raised."""
    results: list[Any] = [None] * len(calls)
    errors: list[BaseException] = []
    start = threading.Barrier(len(calls))

    def make(index: int) -> None:
        try:
            start.wait()
            results[index] = calls[index]()
        except BaseException as error:
            errors.append(error)

    # Daemons: a thread that hangs must not keep the process from ending.
    threads = [threading.Thread(target=make, args=(i,), daemon=True) for i in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(seconds)
    if errors:
        raise errors[0]
    assert not any(thread.is_alive() for thread in threads), "a call hangs"
    return results
