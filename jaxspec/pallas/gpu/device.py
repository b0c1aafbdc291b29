"""The GPU that the kernels are cut for: an H200."""

THREADS = 128  # of a block: Mosaic's warpgroup
MULTIPROCESSORS = 132  # of an H200
_SHARED_MEMORY = 227 * 1024  # bytes that a block may have
_RESERVED = 1024  # bytes of a block, by the GPU; as much for barriers


def room(blocks: int) -> int:
    """Bytes of shared memory for each of so many blocks.

    Where there are more than multiprocessors, two fit on one, or some would wait for others to end.
    """
    if blocks <= MULTIPROCESSORS:
        return _SHARED_MEMORY - _RESERVED
    return _SHARED_MEMORY // 2 - 2 * _RESERVED


def parts(blocks: int, units: int) -> int:
    """Into how many equal parts the units are cut, for as many times `blocks` to run at once."""
    most = max(1, MULTIPROCESSORS // blocks)
    return max(count for count in range(1, most + 1) if units % count == 0)
