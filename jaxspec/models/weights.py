"""Match a checkpoint's tensors with a model's parameters, and load them; random weights."""

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from tqdm import tqdm

from jaxspec.models.blocks import Source
from jaxspec.models.checkpoint import Checkpoint, listed
from jaxspec.models.checkpoint_module import CheckpointModule
from jaxspec.models.config import ModelConfig
from jaxspec.models.copies import check_copies, stored_alike, without_copies
from jaxspec.models.layers.parameters import Placement
from jaxspec.models.layers.trunk import LAYERS
from jaxspec.models.layers.weight_matrix import name_of_part, parts_of, stored
from jaxspec.models.safetensors_file import DTYPES, INTEGERS, QUANTISED
from jaxspec.models.shards import of_devices
from jaxspec.models.source import naming
from jaxspec.models.transfer import to_device
from jaxspec.parallel import Group

Some = TypeVar("Some", bound=CheckpointModule)

_WRONG_DTYPE = f"Wrong dtype, which must be one of {', '.join(DTYPES)}"
_NO_INTEGER = f"Wrong dtype, which must be one of {', '.join(INTEGERS)}"
# A config.json of a kilobyte can declare tens of millions of tensors. The first limit is over five
# times what published models have; the second is enough to recognise the spelling of a checkpoint.
_MANY = 200_000  # tensors compared one by one, unless the checkpoint has more
_LOOKED_FOR = 64  # tensors of an alternative spelling


def read_weights(
    model: CheckpointModule,
    of_ranks: Sequence[Iterable[Placement]],
    published: Mapping[str, list[str]],
    checkpoint: Checkpoint,
    group: Group,
    progress: bool = False,
) -> None:
    """Load the parameters of a model that was `compared` to the devices of a group.

    After an error or Ctrl-C nothing stays in memory.

    Args:
        model: The model, whose values are checked.
        of_ranks: Where each tensor goes, for each device; those of other nodes are not used.
        published: The checkpoint's names of each canonical name.
        checkpoint: The open checkpoint.
        group: The devices.
        progress: Show a progress bar if loading takes longer than half a second.

    Raises:
        ValueError: A value is invalid, a copy of a tensor differs, or a file changed meanwhile.
    """
    if type(model).copies:
        names = with_copies(type(model), model.config.whole, checkpoint.names)
        check_copies(type(model), names, stored_alike(checkpoint), str(checkpoint.path))
    held: dict[int, tuple[nnx.Param, list[jax.Array]]] = {}
    for rank in group.own_ranks:
        with group.default(rank):
            sources = sources_of(of_ranks[rank], published, checkpoint)
            for source, value in zip(sources, _read(sources, checkpoint, progress), strict=True):
                source.param.set_value(value)
                held.setdefault(id(source.param), (source.param, []))[1].append(value)
            with naming(checkpoint.path):
                model.check_values()
    _set_shared(held.values(), group)


def _set_shared(held: Iterable[tuple[nnx.Param, list[jax.Array]]], group: Group) -> None:
    """Set each parameter to the group's array of the values of its devices."""
    for param, values in held if group.size > 1 else ():
        param.set_value(group.stacked(values))


def _read(sources: Sequence[Source], checkpoint: Checkpoint, progress: bool) -> list[jax.Array]:
    with tqdm(
        total=sum(source.num_bytes for source in sources),
        desc="loading",
        unit="B",
        unit_scale=True,
        delay=0.5,
        leave=False,
        disable=not progress,
    ) as bar:
        return to_device(sources, checkpoint, bar.update)


def as_published(
    placements: Iterable[Placement], published: Collection[str], checkpoint: Checkpoint
) -> Iterator[Placement]:
    """Yield the placements in the spelling that the checkpoint has."""
    count, most = 0, max(_MANY, len(published))
    for placement in placements:
        if placement.name in published or not _is_spelled_otherwise(placement, published):
            yield placement
            continue
        assert placement.instead is not None
        for other in placement.instead():
            count += 1
            if count > most:
                asked, held = f"more than {most:,} tensors", f"{len(published):,}"
                raise _misfit(checkpoint, f"It asks for {asked}, and there are {held}.")
            yield other


def _is_spelled_otherwise(placement: Placement, published: Collection[str]) -> bool:
    """Return whether the checkpoint has some of the first alternative tensors."""
    if placement.instead is None:
        return False
    first = itertools.islice(placement.instead(), _LOOKED_FOR)
    return any(other.name in published for other in first)


class Compared(NamedTuple, Generic[Some]):
    """A model without values whose parameters match the tensors of a checkpoint."""

    model: Some
    placements: list[Placement]  # of each tensor
    published: dict[str, list[str]]  # the checkpoint's names of each canonical name

    def on_devices(
        self, config: ModelConfig, dtype: jnp.dtype, checkpoint: Checkpoint, devices: int
    ) -> tuple[Some, list[list[Placement]]]:
        """Return the model with the sizes of one device, and its placements on each device.

        `config` has the sizes of one of several devices.
        """
        if devices == 1:
            return self.model, [self.placements]
        model = undefined(type(self.model), config, dtype, frozenset(self.published))
        local = list(as_published(model.checkpoint(), self.published, checkpoint))
        return model, of_devices(self.placements, local, devices)


def compared(
    family: type[Some], config: ModelConfig, dtype: jnp.dtype, checkpoint: Checkpoint
) -> Compared[Some]:
    """Compare a model with the checkpoint's tensors, of which none is read.

    Raises:
        ValueError: Tensors are missing, unexpected, duplicated, or have a wrong shape or dtype. One
            error lists them all.
    """
    published = published_names(family, config, checkpoint.names)
    _check_layers(config, published, checkpoint)
    model = undefined(family, config, dtype, frozenset(published))
    placements = list(as_published(model.checkpoint(), published, checkpoint))
    check_tensors(placements, published, checkpoint)
    return Compared(model, placements, published)


def published_names(
    family: type[CheckpointModule], config: ModelConfig, names: Iterable[str]
) -> dict[str, list[str]]:
    """Return the names of tensors that a module uses, by canonical name; copies are left out."""
    return without_copies(family, with_copies(family, config, names))


def with_copies(
    family: type[CheckpointModule], config: ModelConfig, names: Iterable[str]
) -> dict[str, list[str]]:
    """Return what `published_names` returns, with copies (`CheckpointModule.copies`)."""
    published: dict[str, list[str]] = {}
    for name in sorted(names):
        canonical = family.canonical_name(name, config)
        if canonical is not None:
            published.setdefault(canonical, []).append(name)
    return published


def undefined(
    family: type[Some], config: ModelConfig, dtype: jnp.dtype, tensors: frozenset[str] | None
) -> Some:
    """Make a model without values, for these `tensors` (see `CheckpointModule`)."""
    return nnx.eval_shape(lambda: family(config, dtype, tensors))


def sources_of(
    placements: Iterable[Placement], published: Mapping[str, list[str]], checkpoint: Checkpoint
) -> list[Source]:
    """Return the source of each parameter of the placements; arguments as in `read_weights`."""
    of_param: dict[int, list[Placement]] = {}
    for placement in stored(placements):
        of_param.setdefault(id(placement.param), []).append(placement)

    def name_of(canonical: str) -> str:
        name, part = parts_of(canonical)
        return name_of_part(published[name][0], part)

    def dtype_of(name: str) -> np.dtype:
        return (DTYPES | INTEGERS | QUANTISED)[checkpoint.stored(name).dtype]

    return [Source.of(each, name_of, dtype_of) for each in of_param.values()]


def _check_layers(config: ModelConfig, published: Collection[str], checkpoint: Checkpoint) -> None:
    """Refuse a checkpoint with fewer layers than config.json, before the layers are built."""
    asked = len(config.layer_types)
    layers = [name.removeprefix(LAYERS) for name in published if name.startswith(LAYERS)]
    held = len({name.partition(".")[0] for name in layers})
    if held < asked:
        raise _misfit(checkpoint, f"It asks for {asked} layers, and the tensors are of {held}.")


def check_tensors(
    placements: Sequence[Placement],
    published: Mapping[str, list[str]],
    checkpoint: Checkpoint,
    may_lack: Callable[[str], bool] = lambda name: False,
) -> None:
    """Compare the tensors of a checkpoint with the placements of a module.

    Args:
        placements: The placements, in the spelling of the checkpoint.
        published: The checkpoint's names of each canonical name.
        checkpoint: The open checkpoint.
        may_lack: Returns whether a tensor may be missing, by its canonical name.

    Raises:
        ValueError: As in `compared`.
    """
    wanted = {placement.name: placement for placement in placements}
    ignored: frozenset[str] = getattr(checkpoint, "zero_biases", frozenset())
    unexpected = {
        canonical
        for canonical in published.keys() - wanted.keys()
        if not ignored.issuperset(published[canonical])
    }
    twice = dict(_in_both_spellings(placements, published, unexpected))
    problems = {
        "Missing": sorted(name for name in wanted.keys() - published.keys() if not may_lack(name)),
        "Unexpected": sorted(
            name for canonical in unexpected - twice.keys() for name in published[canonical]
        ),
        "Twice": [f"{name} ({stack} has it, too)" for name, stack in twice.items()],
        "Wrong shape": [],
        _WRONG_DTYPE: [],
        _NO_INTEGER: [],
    }
    for canonical, names in sorted(published.items()):
        files = [file for name in names for file in checkpoint.files_of(name)]
        if len(files) > 1:
            problems["Twice"].append(f"{canonical} (in {' and '.join(files[:2])})")
        for name in names if canonical in wanted else ():
            stored, place = checkpoint.stored(name), wanted[canonical]
            if stored.shape != place.shape:
                problems["Wrong shape"].append(
                    f"{name} {list(stored.shape)} instead of {list(place.shape)}"
                )
            if stored.dtype not in (INTEGERS if place.is_integer else DTYPES):
                wrong = _NO_INTEGER if place.is_integer else _WRONG_DTYPE
                problems[wrong].append(f"{name} {stored.dtype}")
    if any(problems.values()):
        found = [
            f"{kind} ({len(named):,}): {listed(named)}."
            for kind, named in problems.items()
            if named
        ]
        missing = (each for each in placements if each.name not in published)
        raise _misfit(checkpoint, " ".join([*found, *_other_spelling(missing)]))


def _in_both_spellings(
    placements: Iterable[Placement], published: Collection[str], unexpected: Collection[str]
) -> Iterator[tuple[str, str]]:
    """Yield tensors whose values another tensor also has, with the last part of its name."""
    pairs = (
        (other.name, placement.name.removesuffix(".weight").rpartition(".")[2])
        for placement in placements
        if placement.instead is not None and placement.name in published
        # A joint tensor of gate and up may be needed for only one of them, and is then expected.
        # All other duplicates are unexpected, and there may be thousands.
        for other in itertools.islice(placement.instead(), None if unexpected else 1)
    )
    for name, holder in itertools.islice(pairs, _MANY):
        if name in published:
            yield name, holder


def _other_spelling(missing: Iterable[Placement]) -> Iterator[str]:
    """Yield a sentence on the first missing tensor that has an alternative spelling."""
    for placement in missing:
        if placement.instead is not None:
            first, *others = placement.instead()
            more = f" and {len(others):,} more" if others else ""
            yield f"{placement.name} may also come as {first.name}{more}."
            return


def _misfit(checkpoint: Checkpoint, found: str) -> ValueError:
    return ValueError(
        f"The tensors in {checkpoint.path} must be exactly those its {checkpoint.asked_by} asks "
        f"for. {found} {checkpoint.remedy}"
    )


def draw_weights(model: CheckpointModule, group: Group) -> None:
    """Initialise the parameters as before training, the same way every time.

    The device draws one parameter after the other, so it needs little more memory than the weights,
    and nothing is copied from the host. All devices of a group draw the same values, so that the
    heads of one repeat those of another.
    """
    params = {id(placement.param): placement.param for placement in stored(model.checkpoint())}
    held = [(param, param.shape, list[jax.Array]()) for param in params.values()]
    for rank in group.own_ranks:
        with group.default(rank):
            key = jax.random.key(0)
            for number, (param, shape, values) in enumerate(held):
                draw = jax.jit(param.get_metadata("init"), static_argnums=(1, 2))
                values.append(draw(jax.random.fold_in(key, number), shape, param.dtype))
                param.set_value(values[-1])
    _set_shared(((param, values) for param, _, values in held), group)
