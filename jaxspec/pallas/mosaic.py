"""Accesses to memory that the Mosaic GPU kernels share.

They are handed the module `plgpu`, because importing it takes 0.2 s and not every build of jaxlib
for a CPU can.
"""

import math

THREADS = 128  # of a block: Mosaic's warpgroup
ACCESS = 16  # bytes, the widest access of a thread


def load(plgpu, ref, layout):
    """What `ref` holds, into registers of this layout, by whatever accesses that takes."""
    # pyright knows the signature of jax 0.10, where no kernel runs.
    return plgpu.load(ref, layout=layout, optimized=False)  # pyright: ignore[reportCallIssue]


def store(plgpu, ref, x):
    """Also pieces smaller than a sector of 32 bytes, which jax 0.12 refuses to `ref[...] = x`."""
    if hasattr(plgpu, "store"):
        plgpu.store(ref, x, optimized=False)
    else:
        ref[...] = x


def vector_length(size: int, itemsize: int) -> int:
    """How many neighbours a thread takes at once from `size` elements; 0: they do not divide."""
    whole, rest = divmod(size, THREADS)
    vector = math.gcd(whole, ACCESS // itemsize)
    return 0 if rest or vector * itemsize < 4 else vector


def vectors(plgpu, vector: int):
    """Register layout of `THREADS * vector` elements in a row: `vector` neighbours a thread."""
    return plgpu.Layout.WG_STRIDED((THREADS * vector,), vec_size=vector)
