"""WeightLayout: the places of published tensors in a loaded module, and new values for them."""

import fnmatch
import functools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxspec.models.base import CheckpointModule, ModelSpec
from jaxspec.models.checkpoint import Checkpoint, listed
from jaxspec.models.config import ModelConfig
from jaxspec.models.copies import check_copies
from jaxspec.models.layers.mtp_head import PREFIX
from jaxspec.models.layers.parameters import Placement
from jaxspec.models.layers.weight_matrix import Form, Holder, parts_of, stored
from jaxspec.models.quantised.checkpoint import QuantisedCheckpoint
from jaxspec.models.quantised.holding import rounding
from jaxspec.models.quantised.rounded import RoundedCheckpoint
from jaxspec.models.quantised.scheme import Scheme
from jaxspec.models.shards import of_devices
from jaxspec.models.source import dequantised, naming
from jaxspec.models.trees.checkpoint import Tensor, TreeCheckpoint, own_names
from jaxspec.models.trees.filling import Copied, Filling, FromTensors, LeafOfRank
from jaxspec.models.trees.leaves import Leaf, Part, await_copies, near
from jaxspec.models.weights import (
    as_published,
    check_tensors,
    published_names,
    undefined,
    with_copies,
)
from jaxspec.parallel import Group

_HEAD, _EMBEDDINGS = "lm_head.weight", "model.embed_tokens.weight"

Weights = Sequence[jax.Array]
"""Leaves of a module, in the order of `ModelSpec.weights_of`."""


class _Plan(NamedTuple):
    published: dict[str, list[str]]
    placements: list[Placement]  # of the whole module
    leaves: dict[int, list[LeafOfRank]]  # by index


class WeightLayout:
    """The parameters of a loaded module, and how tensors fill them."""

    def __init__(
        self,
        spec: ModelSpec,
        group: Group,
        scheme: Scheme | None,
        *,
        rounds: bool,
        scales_kv: bool,
    ):
        """Describe a loaded module.

        Args:
            spec: The module on one device.
            group: The devices.
            scheme: The formats of a folder of quantised weights.
            rounds: Matrices were rounded to FP8 while they were read.
            scales_kv: Scales of keys and values were read.
        """
        self.spec, self.group = spec, group
        self._scheme, self._rounds, self._scales_kv = scheme, rounds, scales_kv
        self._last: tuple[Any, _Plan] | None = None  # of a tree with the same names

    @staticmethod
    def of(
        model: CheckpointModule,
        dtype: jnp.dtype,
        group: Group,
        scheme: Scheme | None,
        *,
        rounds: bool,
        scales_kv: bool = False,
    ) -> "WeightLayout":
        """Describe a module that will be loaded; see the constructor."""
        spec = ModelSpec.of(model, dtype)
        return WeightLayout(spec, group, scheme, rounds=rounds, scales_kv=scales_kv)

    @functools.cached_property
    def local(self) -> CheckpointModule:
        """The module on one device, without values."""
        return self.spec.model()

    @functools.cached_property
    def _whole(self) -> CheckpointModule:
        return self.local if self.group.size == 1 else self.spec.whole.model()

    @property
    def forms(self) -> tuple[Form | None, ...]:
        """The forms of matrices in 8 or 4 bits; None for those in 16 bits."""
        return self.spec.forms

    def specs(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Return the shape and dtype of each published tensor, by canonical name."""
        return {
            each.name: jax.ShapeDtypeStruct(each.shape, each.param.dtype)
            for each in self._whole.checkpoint()
        }

    @functools.cached_property
    def own_specs(self) -> dict[str, jax.ShapeDtypeStruct]:
        """The shape and dtype of each leaf by name; devices have parts of the first axis."""
        names, leaves = zip(*own_names(nnx.state(self.local)), strict=True)
        return dict(zip(names, self.group.like(leaves), strict=True))

    def fitting(self, name: str, arrays: Mapping[str, Tensor], keep: Sequence[str]) -> Filling:
        """Compare a tree with the module; nothing is computed yet.

        Args:
            name: Name of the argument, for errors.
            arrays: Tensors by published names, or leaves by their names in `own_specs`.
            keep: Patterns of names that may be missing; these parameters stay.

        Raises:
            ValueError: tensors are missing, unexpected or doubled, or have a wrong shape or dtype.
        """
        if _are_leaves(arrays, self.own_specs):
            return self._of_leaves(name, arrays, keep)
        tree = TreeCheckpoint(arrays)
        family, config = self.spec.family, self.spec.whole.config
        checkpoint = dequantised(tree, self._scheme, family.uses(config), scales_kv=self._scales_kv)
        self._check_copies(name, arrays)
        plan, checkpoint = self._plan(name, tree, checkpoint, keep)
        may_lack = functools.partial(_matches, keep)
        check_tensors(plan.placements, plan.published, checkpoint, may_lack)
        self._check_values(plan, tree)
        makers = {
            index: FromTensors(self.group, of_ranks, plan.published, tree, checkpoint)
            for index, of_ranks in plan.leaves.items()
        }
        return Filling(arrays, makers)

    # Leaves

    def _of_leaves(self, name: str, arrays: Mapping[str, Tensor], keep: Sequence[str]) -> Filling:
        wanted, problems = self.own_specs, list[str]()
        for path, spec in wanted.items():
            array = arrays.get(path)
            if array is None:
                problems += [] if _matches(keep, path) else [f"{path} is missing"]
            elif array.shape != spec.shape:
                problems.append(f"{path} has the shape {list(array.shape)}, not {list(spec.shape)}")
            elif not _is_cast(array.dtype, spec.dtype):
                problems.append(f"{path} is {array.dtype}, not {spec.dtype}")
        problems += [f"{path} is none of them" for path in arrays if path not in wanted]
        if problems:
            raise ValueError(
                f"{name} must have the leaves of the engine's model: {listed(problems, 200)}. See "
                "LLM.weight_specs('own'), or pass published names."
            )
        numbers = {path: number for number, path in enumerate(wanted)}
        makers = {
            numbers[path]: Copied(self.group, array, wanted[path].dtype)
            for path, array in arrays.items()
        }
        return Filling(arrays, makers)

    # Published tensors

    def _plan(
        self, name: str, tree: TreeCheckpoint, checkpoint: Checkpoint, keep: Sequence[str]
    ) -> tuple[_Plan, Checkpoint]:
        """Return the plan of a tree, and its checkpoint, which rounds if the module was rounded."""
        key = tree.names, checkpoint.names, tuple(keep)
        published = published_names(self.spec.family, self.spec.whole.config, checkpoint.names)
        published = self._without_tied_head(name, published, tree)
        is_known = self._last is not None and self._last[0] == key
        if self._last is not None and is_known:
            placements = self._last[1].placements
        else:
            placements = list(as_published(self._whole.checkpoint(), published, checkpoint))
        if self._rounds:
            there = (each for each in placements if each.name in published)
            checkpoint = rounding(checkpoint, there, published)
        if self._last is None or not is_known:
            of_ranks = [placements]
            if self.group.size > 1:
                local = list(as_published(self.local.checkpoint(), published, checkpoint))
                of_ranks = of_devices(placements, local, self.group.size)
            self._check_forms(of_ranks, published, checkpoint)
            leaves = self._leaves(of_ranks, published, tree, checkpoint)
            self._last = key, _Plan(published, placements, leaves)
        return self._last[1], checkpoint

    def _leaves(
        self,
        of_ranks: Sequence[Iterable[Placement]],
        published: Mapping[str, list[str]],
        tree: TreeCheckpoint,
        checkpoint: Checkpoint,
    ) -> dict[int, list[LeafOfRank]]:
        leaves = ModelSpec.weights_of(self.local)
        numbers = {id(leaf): number for number, leaf in enumerate(leaves)}
        found: dict[int, list[LeafOfRank]] = {}
        for rank in self.group.own_ranks:
            of_leaf: dict[int, list[Placement]] = {}
            for placement in stored(of_ranks[rank]):
                number = numbers[id(placement.param.get_value())]
                of_leaf.setdefault(number, []).append(placement)
            for number, all_of_it in of_leaf.items():
                each = _of_rank(leaves[number], all_of_it, published, tree, checkpoint)
                found.setdefault(number, []).append(each)
        changed = {n: each for n, each in found.items() if any(rank.placements for rank in each)}
        torn = [
            rank.placements[0].name
            for each in changed.values()
            for rank in each
            if rank.is_read and not rank.is_whole
        ]
        if torn:
            raise ValueError(
                "Tensors of one matrix in 8 or 4 bits must be updated together, and only a part of "
                f"those of {listed(torn)} is there. Add the others, such as all of q, k and v."
            )
        return dict(sorted(changed.items()))

    # Checks

    def _without_tied_head(
        self, name: str, published: dict[str, list[str]], tree: TreeCheckpoint
    ) -> dict[str, list[str]]:
        """Drop an output head of the same values as the embeddings that are its parameter, too."""
        head, embeddings = (published.get(each, []) for each in (_HEAD, _EMBEDDINGS))
        if _HEAD in self.spec.tensors or not head or not embeddings:
            return published
        if not has_equal_head(published, tree.arrays):
            raise ValueError(
                f"{name} must have one tensor for embeddings and output head, which this model "
                f"shares, or equal ones, and {head[0]} differs from {embeddings[0]}. Leave it out, "
                "or create the LLM with weights of both."
            )
        return {canonical: each for canonical, each in published.items() if canonical != _HEAD}

    def _check_copies(self, name: str, arrays: Mapping[str, Tensor]) -> None:
        family, config = self.spec.family, self.spec.whole.config
        if family.copies:
            published = with_copies(family, config, arrays)
            check_copies(
                family, published, lambda *pair: _are_equal(*(arrays[each] for each in pair)), name
            )

    def _check_forms(
        self,
        of_ranks: Sequence[Iterable[Placement]],
        published: Mapping[str, list[str]],
        checkpoint: Checkpoint,
    ) -> None:
        """Refuse tensors in another format than the matrices in 8 or 4 bits that they fill."""
        grain_of: Callable[[str], Any] = getattr(checkpoint, "grain_of", lambda name: None)
        wrong = dict.fromkeys(
            placement.name
            for placements in of_ranks
            for placement in placements
            if isinstance(placement.param, Holder)
            and placement.param.form is not None
            and placement.param.may_hold(placement)
            and placement.name in published
            and grain_of(published[placement.name][0]) != placement.param.form.grain
        )
        if wrong:
            raise ValueError(
                "Matrices in 8 or 4 bits must be updated with tensors in the folder's format, and "
                f"{listed(list(wrong))} are in another. Add their scales, or create the LLM with "
                "quantization='dequantise'."
            )

    def _check_values(self, plan: _Plan, tree: TreeCheckpoint) -> None:
        """Check integers, of which some values are invalid."""
        device = self.group.devices[self.group.own_ranks[0]]
        for number, of_ranks in plan.leaves.items():
            part = of_ranks[0]
            is_integer = jnp.issubdtype(part.leaf.dtype, jnp.integer)
            if part.placements and is_integer and not part.is_read:
                tensors = [near(tree.arrays[name], device) for name in part.names]
                leaves = list(ModelSpec.weights_of(self.local))
                leaves[number] = part.leaf.of(tensors, device)
                with naming(Path(tree.path)):
                    self.spec.with_weights(leaves).check_values()


def fill(
    model: CheckpointModule, layout: WeightLayout, arrays: Mapping[str, Tensor], progress: bool
) -> None:
    """Set the parameters of a module without values from a tree; there is no progress to show.

    Waits for the devices: the caller may write to the tensors afterwards.

    Raises:
        ValueError: As `WeightLayout.fitting`.
    """
    numbers = {id(leaf): number for number, leaf in enumerate(ModelSpec.weights_of(model))}
    params = {
        numbers[id(each.param.get_value())]: each.param for each in stored(model.checkpoint())
    }
    for index, value in layout.fitting("weights", arrays, ()).first_values():
        params[index].set_value(value)
    await_copies(each.get_value() for each in params.values())


def tensors_of_leaves(
    family: type[CheckpointModule],
    config: ModelConfig,
    dtype: jnp.dtype,
    arrays: Mapping[str, Tensor],
) -> frozenset[str] | None:
    """Return the published tensors of the model with these leaves; None if they are no leaves.

    The names of leaves decide whether it has a draft head, and an output head of its own.
    """
    all_tensors = {each.name for each in undefined(family, config, dtype, None).checkpoint()}
    drafts = {name for name in all_tensors if name.startswith(PREFIX)}
    largest = frozenset(all_tensors | {_HEAD})
    for tensors in (largest, largest - {_HEAD}, largest - drafts, largest - drafts - {_HEAD}):
        names = {
            name for name, _ in own_names(nnx.state(undefined(family, config, dtype, tensors)))
        }
        if arrays.keys() == names:
            return tensors
        if tensors is largest and not _are_leaves(arrays, names):
            return None
    return frozenset(all_tensors)  # some are missing or of another model, which `fitting` refuses


def _are_leaves(arrays: Mapping[str, Tensor], names: Collection[str]) -> bool:
    """Return whether most arrays have names of leaves; some published names are equal to such."""
    return 2 * sum(path in names for path in arrays) > len(arrays)


def _of_rank(
    leaf: jax.ShapeDtypeStruct,
    placements: Sequence[Placement],
    published: Mapping[str, list[str]],
    tree: TreeCheckpoint,
    checkpoint: Checkpoint,
) -> LeafOfRank:
    there = [each for each in placements if parts_of(each.name)[0] in published]
    names = [published[parts_of(each.name)[0]][0] for each in there]
    is_plain = all(
        not parts_of(each.name)[1] and _is_plain(name, tree, checkpoint)
        for each, name in zip(there, names, strict=True)
    )
    parts = tuple(Part.of(each, leaf.shape) for each in there)
    is_whole = len(there) == len(placements)
    return LeafOfRank(there, names, Leaf(leaf.shape, leaf.dtype, parts), is_whole, not is_plain)


def _is_plain(name: str, tree: TreeCheckpoint, checkpoint: Checkpoint) -> bool:
    """Return whether the checkpoint reads a tensor as it is in the tree."""
    if checkpoint is tree:
        return True
    if isinstance(checkpoint, RoundedCheckpoint) and checkpoint.grain_of(name) is not None:
        return False
    inner = checkpoint.inner if isinstance(checkpoint, RoundedCheckpoint) else checkpoint
    dequantises = isinstance(inner, QuantisedCheckpoint)
    return not (dequantises and (name in inner.matrices or name in inner.kv_scales))


def has_equal_head(published: Mapping[str, list[str]], arrays: Mapping[str, Tensor]) -> bool:
    """Return whether a tree has an output head of the same values as its embeddings."""
    names = [*published.get(_HEAD, [])[:1], *published.get(_EMBEDDINGS, [])[:1]]
    if len(names) < 2:
        return False
    return _are_equal(*(arrays[name] for name in names))


def without_equal_head(
    family: type[CheckpointModule], config: ModelConfig, arrays: Mapping[str, Tensor]
) -> Mapping[str, Tensor]:
    """Return a tree without an output head that equals the embeddings, as of a tied model."""
    published = published_names(family, config, arrays)
    if config.tie_word_embeddings is False or not has_equal_head(published, arrays):
        return arrays
    return {name: each for name, each in arrays.items() if name not in published[_HEAD]}


def _are_equal(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape:
        return False
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        return np.array_equal(one, other)  # devices may have no memory for two embeddings
    first, second = map(jnp.asarray, (one, other))
    return bool(jnp.array_equal(first, jax.device_put(second, first.sharding)))


def _matches(patterns: Iterable[str], name: str) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _is_cast(dtype: np.dtype, wanted: np.dtype) -> bool:
    """Return whether values of one dtype can be rounded to another of 16 or 32 bits."""
    wide = [jnp.float32, jnp.bfloat16, jnp.float16]
    both = [any(each == kind for kind in wide) for each in (dtype, wanted)]
    return all(both) or dtype == wanted
