"""`WeightUpdates`: new weights for a loaded engine, between two steps; the versions of weights."""

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple, TypeVar, get_args

import jax
import numpy as np

from jaxspec.api.diagnostics import Diagnostics
from jaxspec.checks import shown
from jaxspec.engine.session import FairLock
from jaxspec.models.trees.checkpoint import named_arrays
from jaxspec.models.trees.export import exported
from jaxspec.models.trees.layout import Filling, WeightLayout
from jaxspec.models.trees.leaves import await_copies

Mode = Literal["keep", "recompute", "abort"]
"""What happens to unfinished requests."""
SpecKind = Literal["published", "own", "drafter"]
_Result = TypeVar("_Result")
_VERSION_CHARACTERS = 128


class WeightUpdate(NamedTuple):
    """Result of an update.

    Attributes:
        version: Version of the weights.
        num_bytes: Bytes of the tensors that were given.
        num_requests: Running samples that continue with the new weights or were sent back to be
            computed again; or running and waiting ones that were aborted.
        seconds: Time in which no step was dispatched.
    """

    version: str
    num_bytes: int
    num_requests: int
    seconds: float


class Layouts(NamedTuple):
    """Places of tensors in the model, and in the drafter if it has a checkpoint of its own."""

    model: WeightLayout
    drafter: WeightLayout | None = None


class _Fillings(NamedTuple):
    model: Filling | None
    drafter: Filling | None

    def by_argument(self) -> list[tuple[str, Filling]]:
        named = {"weights": self.model, "drafter": self.drafter}
        return [(name, filling) for name, filling in named.items() if filling is not None]


class WeightUpdates(Diagnostics):
    """New weights for a loaded engine, which sets the attributes."""

    _layouts: Layouts

    def _begin_versions(self, version: str) -> None:
        self._updating = FairLock()
        self._versions = {check_version(version)}
        self.session.scheduler.weight_version = version

    @property
    def weight_version(self) -> str:
        """Version of the current weights: "0", or the option, until they are updated."""
        return self.session.scheduler.weight_version

    def weight_specs(self, kind: SpecKind = "published") -> dict[str, jax.ShapeDtypeStruct]:
        """Return the names, shapes and dtypes that `update_weights` takes.

        Args:
            kind: "published" for tensors as the checkpoint names them, "own" for the leaves of the
                engine's model, or "drafter" for the tensors of the drafter's checkpoint. The dtype
                is that of the parameter; tensors may have any of 16 or 32 bits.

        Returns:
            A `jax.ShapeDtypeStruct` by name. Matrices of a quantised folder are described in 16
            bits.

        Raises:
            ValueError: the kind is another one, or the drafter has no checkpoint of its own.
        """
        if kind not in get_args(SpecKind):
            raise ValueError(
                f"kind must be one of {', '.join(map(repr, get_args(SpecKind)))}, got "
                f"{shown(kind)}."
            )
        if kind == "own":
            return dict(self._layouts.model.own_specs)
        return self._layout_of("drafter" if kind == "drafter" else "weights").specs()

    def update_weights(
        self,
        weights: Any = None,
        *,
        version: str | None = None,
        mode: Mode = "keep",
        keep: Sequence[str] = (),
        drafter: Any = None,
        check_finite: bool = False,
    ) -> WeightUpdate:
        """Replace the weights between two steps, with all that was computed from earlier ones.

        The tensors are copied; the caller may write to them, donate or delete them afterwards.
        Draft heads, 8-bit copies and folded scales are made of the new tensors. Cached prefixes of
        all tiers are dropped. Steps in flight are not awaited; their tokens have the earlier
        version. Parameters are replaced one by one, so that device memory holds the weights, the
        tensors and one parameter, and copies of tensors from elsewhere: 512 MB, or those of one
        parameter. An error before the first of them changes nothing.

        Args:
            weights: A mapping from published names to arrays of JAX, NumPy or DLPack, an iterator
                of pairs of a name and an array, or the leaves of the engine's model: an `nnx.State`
                or a mapping from the names of `weight_specs("own")`. None changes `drafter` alone.
            version: Text of 1 to 128 characters that no earlier weights had. None means the lowest
                number that none had.
            mode: "keep" continues running requests with the new weights, on the keys, values and
                states that earlier weights computed. "recompute" computes these again. "abort" ends
                all unfinished requests.
            keep: Patterns, such as "mtp.*", of names of `weight_specs()` that may be missing. These
                parameters stay as they are.
            drafter: The same for a drafter with a checkpoint of its own, by its names.
            check_finite: Refuse tensors with a NaN or an infinity.

        Returns:
            The version, and counts.

        Raises:
            ValueError: tensors are missing, unexpected, doubled, deleted or not finite, or have a
                wrong shape or dtype; or another argument is invalid. Nothing is changed.
            RuntimeError: the engine is closed, is being updated, or has its weights on the host
                (`sleep`); this is a forked child of its process, or a call from within a step. Or
                `keep` would leave weights of an update that was not completed, or dropped ones.
        """
        self.session.require_open()
        self._check_arguments(weights, mode, keep, drafter, check_finite)
        act = functools.partial(self._update, weights, version, mode, keep, drafter, check_finite)
        return self._alone("update_weights", act)

    def export_weights(self) -> dict[str, np.ndarray]:
        """Return copies of the model's weights on the host, by published names.

        They can be saved, or passed to `update_weights`. Factors that the engine folded into
        weights are divided out.

        Returns:
            Arrays in the dtypes of the parameters.

        Raises:
            ValueError: matrices are held in 8 or 4 bits.
            RuntimeError: the engine is closed or has several nodes, or this is a forked child of
                its process, or it sleeps.
        """
        self.session.require_usable()
        self._check_nodes_of_weights()
        model = self._layouts.model
        if any(model.forms):
            raise ValueError(
                "export_weights returns weights that are held in 16 or 32 bits, and matrices of "
                "this engine are held in 8 or 4. Create the LLM with quantization='dequantise', or "
                "save the weights of the trainer."
            )
        return exported(model, self.session.in_turn(self._weights_in_turn))

    def _alone(self, call: str, act: Callable[[], _Result]) -> _Result:
        """Return `act()`, called while no other thread replaces or moves weights."""
        done = self._updating.try_hold(lambda: (act(),))
        if done is None:
            raise RuntimeError(
                "Weights are updated or moved by one call at a time, and another one has not "
                f"ended. Call {call} again after it."
            )
        return done[0]

    def _update(
        self,
        weights: Any,
        version: str | None,
        mode: Mode,
        keep: Sequence[str],
        drafter: Any,
        check_finite: bool,
    ) -> WeightUpdate:
        self._check_awake(weights, keep, drafter)
        if version is None:
            version = self._next_version()
        if check_version(version) in self._versions:
            raise ValueError(
                f"version must be one that no earlier weights had, got {shown(version)} again. "
                "Number the updates, or leave it out."
            )
        fillings = _Fillings(
            self._filling("weights", weights, keep), self._filling("drafter", drafter, keep)
        )
        for name, filling in fillings.by_argument() if check_finite else ():
            filling.check_finite(name)
        self._compile_updates(fillings)
        update = functools.partial(self._update_in_turn, fillings, version, mode)
        updated = self.session.in_turn(update)
        # Steps go on meanwhile. DLPack shares memory that the caller may write to afterwards.
        await_copies((*self._runner.weights, *self._runner.drafter_weights))
        return updated

    def _compile_updates(self, fillings: _Fillings) -> None:
        """Compile programs for trees of new names or dtypes, while steps go on."""
        runner = self._runner
        if fillings.model is not None:
            fillings.model.compile(lambda index: runner.weights[index])
        if fillings.drafter is not None:
            fillings.drafter.compile(lambda index: runner.drafter_weights[index])

    # In a turn

    def _weights_in_turn(self) -> tuple[jax.Array, ...]:
        self.session.gate.check_awake("weights")
        return self._runner.weights

    def _update_in_turn(self, fillings: _Fillings, version: str, mode: Mode) -> WeightUpdate:
        session, runner = self.session, self._runner
        session.require_open()  # another thread may have closed the session
        for name, filling in fillings.by_argument():
            filling.check_there(name)
        started, before = time.perf_counter(), runner.num_changes
        try:
            runner.replace_weights(_values(fillings.model), _values(fillings.drafter))
            num_requests = session.guarded(lambda: self._renew(version, mode))
            session.mend()
            session.gate.open("weights")  # after `sleep(2)`
            self._versions.add(version)
        except BaseException:
            if before != runner.num_changes:
                session.break_off(
                    "An update of weights ended before it was complete, so the model may be a "
                    "mixture. Call update_weights with all tensors."
                )
            raise
        num_bytes = sum(filling.num_bytes for _, filling in fillings.by_argument())
        return WeightUpdate(version, num_bytes, num_requests, time.perf_counter() - started)

    def _renew(self, version: str, mode: Mode) -> int:
        """Drop what earlier weights computed; return `WeightUpdate.num_requests`."""
        scheduler = self.session.scheduler
        num_requests = len(scheduler.running)
        if mode == "recompute":  # before prefixes are dropped: a preemption caches one
            scheduler.preempt_all()
        elif mode == "abort":
            num_requests = self.session.end_all()
        scheduler.renew_weights(version, lambda: self._runner.fingerprint)
        if self._flight is not None:
            self._flight.renew_weights(version)
        return num_requests

    # Checks

    def _check_arguments(
        self, weights: Any, mode: Any, keep: Any, drafter: Any, check_finite: Any
    ) -> None:
        self._check_nodes_of_weights()
        if mode not in get_args(Mode):
            raise ValueError(
                f"mode must be one of {', '.join(map(repr, get_args(Mode)))}, got {shown(mode)}."
            )
        is_patterns = isinstance(keep, list | tuple) and all(isinstance(p, str) for p in keep)
        if not is_patterns:
            raise ValueError(
                f"keep must be a list of patterns of names, such as ['mtp.*'], got {shown(keep)}."
            )
        if not isinstance(check_finite, bool):
            raise ValueError(f"check_finite must be a bool, got {shown(check_finite)}.")
        if weights is None and drafter is None:
            raise ValueError(
                "update_weights takes weights, drafter or both, got None for both. Pass a mapping "
                "from the names of weight_specs() to arrays."
            )

    def _check_awake(self, weights: Any, keep: Sequence[str], drafter: Any) -> None:
        """Refuse to replace weights on the host, or a part of weights that are not there."""
        if self._runner.has_put_away:
            raise RuntimeError(
                "Weights must be on the devices to be updated, and this LLM sleeps with its "
                "weights on the host. Call wake_up(['weights']) first, or sleep(2) to drop them."
            )
        has_all = weights is not None and (drafter is not None or self._layouts.drafter is None)
        is_lost = self.session.gate.is_closed_by("weights")
        if (self.session.is_broken or is_lost) and (keep or not has_all):
            why = "sleep(2) dropped all weights" if is_lost else "An earlier update broke off"
            raise RuntimeError(
                f"{why}, so no parameter can stay as it is. Pass all tensors, without keep"
                f"{', and those of the drafter' if self._layouts.drafter else ''}."
            )

    def _check_nodes_of_weights(self) -> None:
        if (count := self._runner.group.nodes) > 1:
            raise ValueError(
                f"Weights are updated and exported in one process, and this engine has {count} "
                "nodes. Use nnodes=1."
            )

    def _next_version(self) -> str:
        number = len(self._versions)
        while str(number) in self._versions:
            number += 1
        return str(number)

    def _filling(self, name: str, tree: Any, keep: Sequence[str]) -> Filling | None:
        if tree is None:
            return None
        return self._layout_of(name).fitting(name, named_arrays(name, tree), keep)

    def _layout_of(self, name: str) -> WeightLayout:
        if name == "weights":
            return self._layouts.model
        if self._layouts.drafter is None:
            raise ValueError(
                "drafter is for a draft model or head with a checkpoint of its own, and this "
                "engine has none. Draft heads of the model's checkpoint are among its weights."
            )
        return self._layouts.drafter


def check_version(version: Any) -> str:
    """Return a version of weights.

    Raises:
        ValueError: it is no text of 1 to 128 printable characters.
    """
    is_text = isinstance(version, str) and version.isprintable()
    if not is_text or not 0 < len(version) <= _VERSION_CHARACTERS:
        raise ValueError(
            f"A version of weights must be a text of 1 to {_VERSION_CHARACTERS} printable "
            f"characters, got {shown(version)}."
        )
    return version


def _values(filling: Filling | None):
    return _none if filling is None else filling.values


def _none(before: Any) -> Iterator[tuple[int, jax.Array]]:
    return iter(())
