"""Sum over the devices of a group, residual add and RMSNorm: between the halves of a layer."""

import jax.numpy as jnp

from jaxspec.pallas import dispatch
from jaxspec.pallas.norm import mailbox, residual
from jaxspec.pallas.norm.residual import OfDevices, Pending, Stream
from jaxspec.pallas.norm.rms_norm import Norm

_DTYPES = jnp.float32, jnp.bfloat16, jnp.float16


def reduce_add_norm(stream: Stream, pending: OfDevices, norm: Norm) -> tuple[Stream, Stream]:
    """Return `stream + pending`, with the sum of `pending` over all devices, and its norm.

    The sum is that of `residual.reduced` in another order: by rank, in float32. All devices get the
    same bits.

    It is one kernel, which exchanges the parts through the group's mailboxes (`mailbox`), for those
    operands that `why_not_kernel` accepts.
    """
    opened = mailbox.current()
    assert opened is not None
    from jaxspec.pallas.norm.reduce_add_norm_kernel import reduce_add_norm_kernel

    return reduce_add_norm_kernel(stream, pending.own, norm, opened.args, mailbox=opened.mailbox)


def settled(stream: Stream, pending: Pending, norm: Norm) -> Pending:
    """Return `pending` summed over the devices, unless `reduce_add_norm` will sum it."""
    if not isinstance(pending, OfDevices):
        return pending
    why = why_not_kernel(stream, pending, norm)
    if dispatch.runs_kernel("reduce_add_norm", why, rows=stream.shape[0], by_choice=True):
        return pending
    return residual.reduced(pending)


def why_not_kernel(stream, pending, norm):
    opened, own = mailbox.current(), pending.own
    rows, features = stream.shape
    if opened is None:
        return "the devices have no mailboxes"
    if rows > opened.mailbox.rows:
        return f"{rows} rows"
    if not mailbox.can_hold(features) or features > opened.mailbox.features:
        return f"{features} features"
    expected = stream.dtype if own.ndim == 2 else jnp.float32
    known = stream.dtype in _DTYPES and norm.weight.dtype in _DTYPES
    if own.dtype != expected or not known:
        return f"{stream.dtype} and {own.dtype} with a weight in {norm.weight.dtype}"
    return None
