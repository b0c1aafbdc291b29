"""The sizes of the GPU that the kernels are cut for: an H200 (an H100's are the same)."""

THREADS = 128  # of a block: one warpgroup
MULTIPROCESSORS = 132
_SHARED_MEMORY = 227 * 1024  # bytes that a block may have
_RESERVED = 1024  # bytes of a block that the GPU keeps, and as many for barriers


def room(blocks: int) -> int:
    """The bytes of shared memory for each of `blocks` blocks.

    More blocks than multiprocessors get half of it each: two then run on one multiprocessor, and
    none waits for another to end.
    """
    if blocks <= MULTIPROCESSORS:
        return _SHARED_MEMORY - _RESERVED
    return _SHARED_MEMORY // 2 - 2 * _RESERVED


def parts(blocks: int, units: int) -> int:
    """The largest number of equal parts of `units` whose blocks all run at once.

    Each part has `blocks` blocks.

        parts(16, 28) == 7: 7 x 16 blocks on 132 multiprocessors, with 4 units each
    """
    limit = max(1, MULTIPROCESSORS // blocks)
    return max(count for count in range(1, limit + 1) if units % count == 0)
