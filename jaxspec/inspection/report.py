"""`Inspection`, the result of `jaxspec.inspect`, and its report as text."""

import dataclasses
from collections.abc import Iterator, Mapping

from jaxspec.inspection.find import CONFIG_ALONE
from jaxspec.inspection.quantised import Counts, Quantised
from jaxspec.inspection.sizes import CacheBytes, Fit, Parameters
from jaxspec.models.layers.moe import MoEConfig
from jaxspec.runner.memory import human

_REQUESTS = (1, 8, 64)  # numbers of requests in the report's table
_WIDTHS = {8: "FP8", 4: "4 bits"}  # of weights as published


@dataclasses.dataclass(frozen=True)
class Inspection:
    """Model as it would run with the given options; `str()` of it is a report.

    If config.json was refused, or an option does not fit the model, the fields that depend on it
    are None or empty.
    """

    model: str  # as passed to `inspect`
    read: str  # description of the files that were read
    refused: tuple[str, ...]  # messages of all errors of `LLM`; empty if it runs
    device: str  # kind of the default device
    max_bytes: int | None  # for weights and caches; None if the device reports no memory
    devices: int = 1  # that share the model; all bytes but the stored ones are of one of them
    architecture: str | None = None  # named in config.json
    family: str | None = None  # name of the model class
    layers: Mapping[str, int] = dataclasses.field(default_factory=dict)  # count by class names
    experts: MoEConfig | None = None  # None for a dense model
    held_experts: MoEConfig | None = None  # the same, with the sizes of one device
    draft_heads: tuple[str, ...] = ()  # class names of the heads with tensors
    promised_draft_layers: int = 0  # expected by config.json or the family; tensors decide
    parameters: Parameters | None = None  # text model without draft heads
    draft_parameters: Parameters | None = None  # draft head alone
    stored_bytes: Mapping[str, int] = dataclasses.field(default_factory=dict)  # in files, by dtype
    quantised: Quantised | None = None  # None for weights of 16 or 32 bits
    weight_bytes: Mapping[str, int] = dataclasses.field(default_factory=dict)  # on a device
    num_drafts: int | None = None  # drafts per verify step
    kv_dtype: str | None = None  # dtype of keys and values
    state_policy: str | None = None  # of recurrent states; None if there are none
    state_dtype: str | None = None
    cache: CacheBytes | None = None
    fits: tuple[Fit, ...] = ()  # by ascending length of requests

    def __str__(self) -> str:
        return "\n".join(_lines(self))


def _lines(found: Inspection) -> Iterator[str]:
    yield f"{found.model}: {found.architecture or 'no architecture is known'}"
    rows = [("read", found.read), *_about_the_model(found), *_about_the_cache(found)]
    for name, text in rows:
        yield f"  {name:<14}{text}"
    if found.fits:
        yield from _table(found)
    if not found.refused:
        yield "Nothing of it is refused."
    else:
        yield f"REFUSED, for {len(found.refused)} reason{'s' * (len(found.refused) > 1)}:"
        yield from (f"- {message}" for message in found.refused)


def _about_the_model(found: Inspection) -> Iterator[tuple[str, str]]:
    if found.family is not None:
        yield "family", found.family
        yield "layers", ", ".join(f"{count} {kind}" for kind, count in found.layers.items())
    if found.experts is not None:
        rule = found.experts.routing
        shared = ", and 1 shared" if found.experts.shared_size else ""
        chosen = f"{rule.num_experts} a layer, of which a token goes to {rule.num_chosen}"
        yield "experts", chosen + shared
    if found.family is not None:
        remark = ""
        if found.read == CONFIG_ALONE:
            remark = ", by config.json; a checkpoint's tensors decide"
        elif found.promised_draft_layers and not found.draft_heads:
            remark = ", though config.json or the family promises one"
        yield "draft head", (", ".join(found.draft_heads) or "none") + remark
    if found.parameters is not None:
        yield "parameters", _counted(found.parameters)
    if found.draft_parameters is not None:
        yield "", f"and in the draft head {_counted(found.draft_parameters)}"
    if found.stored_bytes:
        yield "stored", _by_dtype(found.stored_bytes)
    if found.quantised is not None:
        yield from _about_quantised(found.quantised)
    if found.devices > 1 and found.weight_bytes:
        yield "devices", f"{found.devices} share the model; what follows is of each of them"
        if found.held_experts is not None:
            yield "experts here", _held(found.held_experts)
    if found.weight_bytes:
        yield "weights here", _by_dtype(found.weight_bytes)


def _about_quantised(quantised: Quantised) -> Iterator[tuple[str, str]]:
    name, formats = "quantised", quantised.formats
    for label, stored in (formats or {}).items():
        words = f"{_number(stored.parameters)} parameters in {label}"
        yield name, f"{words}, {stored.bits:.2f} bits per parameter"
        name = ""
    if formats is None:
        yield name, f"{quantised.kind}, by {quantised.file}; a checkpoint's tensors decide"
    elif not formats:
        yield name, f"no weights, though {quantised.file} declares {quantised.kind}"
    if formats != {}:
        yield "", _run_as(quantised)
    if quantised.on_hopper:
        yield "", f"{_by_bits(quantised.on_hopper, 'would stay')} on a Hopper GPU, in bfloat16"
    if count := quantised.kv_scales:
        words, verb = ("scale", "is") if count == 1 else ("scales", "are")
        used = "used" if quantised.scales_kv else "not used"
        yield "", f"{count:,} {words} of keys and values {verb} {used}"


def _run_as(quantised: Quantised) -> str:
    """Return how many parameters are held, and what becomes of the others and of activations."""
    words, others = f"dequantised to {quantised.dtype}", quantised.dequantised
    if quantised.held:
        more = "" if others == {} else f", others are {words}"
        words = f"{_by_bits(quantised.held, 'stay')}{more}"
    is_rounded = quantised.terms == 1 and 8 in quantised.held
    fate = "rounded before they multiply FP8" if is_rounded else "not rounded"
    return f"{words}; activations are {fate}"


def _by_bits(counts: Counts, verb: str) -> str:
    most, *others = sorted(counts, reverse=True)
    words = f"{_number(counts[most])} parameters {verb} in {_WIDTHS[most]}"
    return "".join((words, *(f", {_number(counts[bits])} in {_WIDTHS[bits]}" for bits in others)))


def _held(experts: MoEConfig) -> str:
    whole = experts.routing.num_experts // experts.holders
    words = f"{whole} a layer, {experts.intermediate_size} wide"
    return words + (f", and {experts.shared_size} of the shared one" if experts.shared_size else "")


def _about_the_cache(found: Inspection) -> Iterator[tuple[str, str]]:
    if found.cache is None:
        return
    kept = f"{human(found.cache.token)} ({found.kv_dtype} keys and values)"
    yield "a token keeps", kept if found.cache.token else "nothing"
    if not found.cache.request:
        yield "a request", "nothing besides"
        return
    kept, plain = human(found.cache.request), human(found.cache.request_without_drafts)
    drafts = ""
    if found.num_drafts:
        plural = "s" * (found.num_drafts > 1)
        drafts = f" with {found.num_drafts} draft{plural}, {plain} without"
    how = f" ({found.state_policy}, {found.state_dtype})" if found.state_policy else ""
    yield "a request", f"{kept}{drafts}{how}"
    if found.cache.checkpoint:
        yield "a prefix", f"{human(found.cache.checkpoint)} for the states behind it, if it is kept"


def _table(found: Inspection) -> Iterator[str]:
    """Yield the table of memory by length of requests."""
    room = "which does not tell its memory"
    if found.max_bytes is not None:
        room = f"{human(found.max_bytes)} for weights and caches"
    where = "this device" if found.devices == 1 else f"each of {found.devices} devices"
    yield f"On {where} ({found.device}, {room}) weights and full requests take:"
    columns = ["max_model_len", *(f"{n} request{'s' * (n > 1)}" for n in _REQUESTS), "fit at once"]
    yield "  " + "".join(f"{column:>14}" for column in columns)
    for fit in found.fits:
        needs = [human(fit.fixed_bytes + n * fit.request_bytes) for n in _REQUESTS]
        most = "unknown" if fit.requests is None else f"{fit.requests:,}"
        yield "  " + "".join(f"{cell:>14}" for cell in [f"{fit.max_model_len:,}", *needs, most])


def _counted(parameters: Parameters) -> str:
    return f"{_number(parameters.total)}, of which a token uses {_number(parameters.active)}"


def _number(count: int) -> str:
    """Format a count: 1.23 B, 45.6 M or 789."""
    for size, unit in ((10**9, " B"), (10**6, " M"), (10**3, " k")):
        if count >= size:
            return (
                f"{count / size:.3g}{unit}" if count < 100 * size else f"{count / size:.1f}{unit}"
            )
    return str(count)


def _by_dtype(num_bytes: Mapping[str, int]) -> str:
    sizes = sorted(num_bytes.items(), key=lambda item: -item[1])
    return ", ".join(f"{human(size)} {dtype}" for dtype, size in sizes)
