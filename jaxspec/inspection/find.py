"""Search for the configuration and the tensor headers of a model, and for faults in them."""

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import jax.numpy as jnp

from jaxspec.api.loading import folder_of, import_plugin
from jaxspec.files import read_json
from jaxspec.gguf import is_gguf
from jaxspec.inspection.config_faults import parse
from jaxspec.inspection.quantised import Quantised, hold_declared, hold_stored
from jaxspec.models import family_of, with_scales_of
from jaxspec.models.base import Model
from jaxspec.models.checkpoint import INDEX, Checkpoint, read_index
from jaxspec.models.config import ModelConfig
from jaxspec.models.fields import Fields, overridden
from jaxspec.models.layers.moe import sharing_experts
from jaxspec.models.quantised.checkpoint import QuantisedCheckpoint
from jaxspec.models.quantised.holding import rounding
from jaxspec.models.quantised.option import AS_PUBLISHED, DrafterOptions, QuantisedOptions
from jaxspec.models.quantised.rounded import RoundedCheckpoint
from jaxspec.models.quantised.scheme import Scheme
from jaxspec.models.source import giving_sizes, naming, open_checkpoint, read_fields
from jaxspec.models.weights import Compared, compared, undefined
from jaxspec.options.engine_options import EngineConfig
from jaxspec.parallel import Group

CONFIG_ALONE = "config.json alone"  # value of `Found.read` without tensor names
_WEIGHTS = (".safetensors", ".safetensors.index.json", ".bin")


@dataclasses.dataclass
class Found:
    """Configuration, model and faults that were found."""

    read: str  # description of what was read
    refused: list[str]
    architecture: str | None = None
    model: Model | None = None  # without values; None if config.json was refused
    local: Model | None = None  # the same with the sizes of one device; None if they don't divide
    stored_bytes: dict[str, int] = dataclasses.field(default_factory=dict)  # by dtype
    quantised: Quantised | None = None  # None for weights of 16 or 32 bits
    of_drafter: DrafterOptions = AS_PUBLISHED  # options of a drafter's weights

    @contextlib.contextmanager
    def noting(self) -> Iterator[None]:
        """Record an error of the loader, once, and leave the block."""
        try:
            yield
        except (ValueError, FileNotFoundError) as error:
            if str(error) not in self.refused:
                self.refused.append(str(error))


class _Asked(NamedTuple):
    """Options of the weights."""

    path: Path
    scheme: Scheme | None
    options: QuantisedOptions
    devices: int
    is_drawn: bool


def find(options: EngineConfig, dtype: jnp.dtype) -> Found:
    """Find the model of the options, with weights in `dtype` if it were loaded; no weight is read.

    Raises:
        FileNotFoundError: there is no such model.
        ValueError: the name or the revision of the model breaks a rule.
    """
    place = _locate(options)
    found = Found(CONFIG_ALONE, [])
    quantised = QuantisedOptions(options.quantization, options.activation_dtype)
    fields = family = config = scheme = None
    with found.noting(), naming(place.path):
        overrides = options.hf_overrides or {}
        fields = (
            Fields(overridden(read_json(place.path), overrides))
            if place.is_config
            else read_fields(place.path, overrides)
        )
        found.architecture = fields.architecture
        source = place.path if place.path.is_file() else place.path / "config.json"
        family = family_of(fields.architecture, source)
        config, faults = parse(family, fields)
        for fault in faults:
            with found.noting(), naming(place.path):
                raise ValueError(fault)
        if config is not None:
            scheme = fields.scheme()
            quantised.check(scheme, place.path)
    whole = checkpoint = names = None  # without names, config.json decides on a draft head
    with contextlib.ExitStack() as files:
        with found.noting():
            is_read = (lambda name: True) if family is None else family.uses(config)
            checkpoint = place.checkpoint(files, scheme, is_read, scales_kv=options.scales_kv)
            names = place.indexed_names() if checkpoint is None else checkpoint.names
        if scheme is not None:
            found.quantised = Quantised.declared(scheme, checkpoint, dtype)
        if checkpoint is not None:
            found.read, found.stored_bytes = _stored(checkpoint)
        elif names is not None:
            found.read = f"config.json and the names of {len(names):,} tensors in {INDEX}"
        if fields is None or family is None or config is None:
            return found
        if checkpoint is not None:
            config = with_scales_of(checkpoint, config)
            with found.noting(), giving_sizes(fields, place.path):
                whole = compared(family, config, dtype, checkpoint)
                found.model = whole.model
    if names is not None:
        spellings = (family.canonical_name(name, config) for name in names)
        names = frozenset(name for name in spellings if name is not None)
    if found.model is None:
        with found.noting(), giving_sizes(fields, place.path):
            found.model = undefined(family, config, dtype, names)
    found.local = found.model
    devices = options.tensor_parallel_size
    if found.model is not None and devices > 1:
        with found.noting():
            Group.of(devices)
        found.local, local = None, _local(found, place.path, config, options)
        if local is not None:
            found.local = undefined(family, local, dtype, names)
    if found.local is not None:
        is_drawn = options.load_format == "dummy"
        asked = _Asked(place.path, scheme, quantised, devices, is_drawn)
        _hold(found, whole, checkpoint, dtype, asked)
    return found


def _local(
    found: Found, path: Path, config: ModelConfig, options: EngineConfig
) -> ModelConfig | None:
    """Return the sizes of one device; None after noting a fault for each part that has one."""
    before, devices = len(found.refused), options.tensor_parallel_size
    with found.noting(), naming(path):
        config = sharing_experts(config, options.enable_expert_parallel)
    for part in (*config.parts, dataclasses.replace(config, parts=())):
        if hasattr(part, "local"):
            with found.noting(), naming(path):
                part.local(devices)
    return config.local(devices) if len(found.refused) == before else None


def _hold(
    found: Found,
    whole: Compared[Model] | None,
    checkpoint: Checkpoint | None,
    dtype: jnp.dtype,
    asked: _Asked,
) -> None:
    """Hold matrices of the local model in 8 or 4 bits, as loading does."""
    assert found.model is not None and found.local is not None
    scheme, options = asked.scheme, asked.options
    if whole is None or checkpoint is None:
        if options.rounds(scheme, asked.path):
            found.quantised = Quantised.of_rounded(found.quantised, dtype)
        if found.quantised is not None:
            sizes = found.model, found.local, asked.devices
            found.quantised = hold_declared(found.quantised, *sizes, scheme, options)
    else:
        if options.rounds_tensors(scheme, checkpoint):
            checkpoint = rounding(checkpoint, whole.placements, whole.published)
            found.quantised = Quantised.of_rounded(found.quantised, dtype)
        if isinstance(checkpoint, QuantisedCheckpoint | RoundedCheckpoint):
            assert found.quantised is not None
            config, devices = found.local.config, asked.devices
            found.local, of_ranks = whole.on_devices(config, dtype, checkpoint, devices)
            of_checkpoint = whole.published, checkpoint, options
            found.quantised = hold_stored(found.quantised, of_ranks, *of_checkpoint)
    is_rounded = found.quantised is not None and found.quantised.is_rounded
    found.of_drafter = options.of_drafter(is_rounded=is_rounded)
    if not found.refused and (whole is not None or asked.is_drawn):
        with found.noting():
            options.check_held(found.local, asked.path)


class _Place(NamedTuple):
    """Location of a model."""

    path: Path  # a config.json, its folder, or a GGUF file
    has_weights: bool  # weights whose headers are compared
    is_hub: bool = False

    @property
    def is_config(self) -> bool:
        return self.path.is_file() and not is_gguf(self.path)

    def checkpoint(
        self,
        files: contextlib.ExitStack,
        scheme: Scheme | None,
        is_read: Callable[[str], bool],
        *,
        scales_kv: bool,
    ) -> Checkpoint | None:
        """Return the checkpoint, open until `files` closes it; None if there is none to compare.

        Raises:
            FileNotFoundError: files are missing.
            ValueError: a file is damaged.
        """
        if not self.has_weights:
            return None
        try:
            return files.enter_context(
                open_checkpoint(self.path, scheme, is_read, scales_kv=scales_kv)
            )
        except FileNotFoundError:
            if self.is_hub:  # not downloaded here, but may be cached
                return None
            raise

    def indexed_names(self) -> frozenset[str] | None:
        """Return the tensor names in the index of a hub model; None if it has no index.

        Raises:
            ValueError: the index is damaged.
        """
        index = read_index(self.path) if self.is_hub and self.has_weights else None
        return None if index is None else frozenset(index)


def _locate(options: EngineConfig) -> _Place:
    import_plugin(options.model_plugin)
    named = os.path.expanduser(options.model or "")
    if str(named).endswith(".json") and os.path.isfile(named) and options.revision is None:
        return _Place(Path(named), has_weights=False)
    folder = folder_of(options, progress=False, weights=False)
    is_hub = options.model is not None and not os.path.isdir(named)
    is_hub = is_hub and not is_gguf(folder)
    has_weights = is_hub or is_gguf(folder) or any(map(_is_weights, os.listdir(folder)))
    return _Place(folder, has_weights and options.load_format != "dummy", is_hub)


def _is_weights(name: str) -> bool:
    return name.endswith(_WEIGHTS)


def _stored(checkpoint: Checkpoint) -> tuple[str, dict[str, int]]:
    """Return a description of what was read, and the stored bytes of all tensors by dtype."""
    files = {file for name in checkpoint.names for file in checkpoint.files_of(name)}
    count, plural = len(checkpoint.names), "s" * (len(files) != 1)
    words = f"{checkpoint.asked_by} and the headers of {count:,} tensors in {len(files)} file"
    return words + plural, dict(checkpoint.bytes_by_type())
