"""Masks of the host: the ids that a request's grammar and processors allow at each position.

They change with each token. So a separate plan (`plan.MASKS`) writes the masks of the rows that
decode before their step, over those of `plan.TABLES`. Imports no JAX.
"""

import functools
from collections.abc import Sequence

import numpy as np

from jaxspec.grammar import fill_masks
from jaxspec.layout import Field, PackedLayout
from jaxspec.plan.step_shapes import StepShapes
from jaxspec.plan.table_plan import bits_of
from jaxspec.requests.request import Request


@functools.cache
def mask_layout(shapes: StepShapes) -> PackedLayout:
    """Return the layout of a plan that writes the masks of some state slots."""
    masks = shapes.masks_per_write, shapes.width, -(-shapes.vocab_size // 32)
    return PackedLayout(
        [
            Field("slots", "Slots of the masks; 0 writes none.", shape=masks[:1]),
            Field("masks", "One bit per id, the lowest first, by position.", shape=masks),
        ]
    )


def pack_masks(requests: Sequence[Request], shapes: StepShapes) -> list[np.ndarray]:
    """Return packed plans (int32) that write the masks of `masks_per_write` requests each.

    All earlier steps of the requests must be collected: a mask depends on all tokens, and on the
    drafts to verify. The masks of all requests are computed in one call, a thread per request.
    """
    layout, most = mask_layout(shapes), shapes.masks_per_write
    packed = np.zeros((-(-len(requests) // most), layout.size), np.int32)
    masks = _masks(requests, shapes)
    for start, plan in zip(range(0, len(requests), most), packed, strict=True):
        fields, part = layout.unpack(plan), requests[start : start + most]
        fields["slots"][: len(part)] = [request.slot for request in part]
        fields["masks"][: len(part)] = masks[start : start + most]
    return list(packed)


def _masks(requests: Sequence[Request], shapes: StepShapes) -> np.ndarray:
    words = -(-shapes.vocab_size // 32)
    # Places after a draft that the grammar refuses stay -1, and are never read.
    masks = np.full((len(requests), shapes.width, words), -1, np.int32)
    _fill_by_grammars(requests, masks)
    for mask, request in zip(masks, requests, strict=True):
        if request.token_filter is not None:
            request.token_filter.limit(mask, request.prompt, request.output, request.next_drafts)
        if request.params.allowed_token_ids is not None:
            mask &= bits_of(request.params.allowed_token_ids, words)
    return masks


def _fill_by_grammars(requests: Sequence[Request], masks: np.ndarray) -> None:
    places = [place for place, request in enumerate(requests) if request.matcher is not None]
    if len(places) == len(requests):
        matchers = [request.matcher for request in requests]
        fill_masks(matchers, [request.next_drafts for request in requests], masks)
    elif places:
        own = masks[places]
        matchers = [requests[place].matcher for place in places]
        fill_masks(matchers, [requests[place].next_drafts for place in places], own)
        masks[places] = own
