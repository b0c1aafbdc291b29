"""Residual add and RMSNorm, as computed before each mixer and each MLP of a decoder."""

import jax.numpy as jnp

from jaxspec.pallas import dispatch
from jaxspec.pallas.gpu import device
from jaxspec.pallas.norm import residual
from jaxspec.pallas.norm.reduce_add_norm import reduce_add_norm, settled
from jaxspec.pallas.norm.residual import OfDevices, Pending, Stream
from jaxspec.pallas.norm.rms_norm import Norm

_DTYPES = jnp.float32, jnp.bfloat16, jnp.float16
_MAX_FEATURES = 8192  # a thread keeps 64 features of each of three arrays in registers
_SMALL = 512  # with fewer features XLA is as fast


def add_norm(stream: Stream, pending: Pending, norm: Norm) -> tuple[Stream, Stream]:
    """Return `stream + pending`, rounded to the dtype of the stream, and the norm of that sum.

    `pending` is defined in `residual`; if it is None, nothing is added and XLA computes the norm.
    Parts of several devices are summed by `reduce_add_norm`, in one kernel, or before this one.

    The kernel supports streams and norm weights in float32, bfloat16 or float16 (they may differ),
    and 512 to 8192 features in multiples of 128.
    """
    if pending is None:
        return stream, norm(stream)
    pending = settled(stream, pending, norm)
    if isinstance(pending, OfDevices):
        return reduce_add_norm(stream, pending, norm)
    why, is_small = why_not_kernel(stream, pending, norm), stream.shape[1] < _SMALL
    if dispatch.runs_kernel("add_norm", why, rows=stream.shape[0], by_choice=is_small):
        from jaxspec.pallas.norm.add_norm_kernel import add_norm_kernel

        return add_norm_kernel(stream, pending, norm)
    return add_norm_reference(stream, pending, norm)


def add_norm_reference(stream, pending, norm):
    total = residual.add(stream, pending)
    return total, norm(total)


def why_not_kernel(stream, pending, norm):
    expected = stream.dtype if pending.ndim == 2 else jnp.float32
    known = stream.dtype in _DTYPES and norm.weight.dtype in _DTYPES
    if pending.dtype != expected or not known:
        return f"{stream.dtype} and {pending.dtype} with a weight in {norm.weight.dtype}"
    features = stream.shape[1]
    if features % device.THREADS or not _SMALL <= features <= _MAX_FEATURES:
        return f"{features} features"
    return None
