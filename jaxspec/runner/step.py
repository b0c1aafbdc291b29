"""The step: one XLA program from plan to output. Read this file first.

    remap -> prepare -> forward -> verify -> update -> draft

A program with `num_steps` > 1 repeats all stages but the first. A step whose masks the host
computes is divided after the forward pass. The programs of plans that move rows, write sampling
tables or export states are made here, too.
"""

import contextlib
import dataclasses
import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxspec import parallel
from jaxspec.cache import CacheSpec, Moves, Pools, SavedState, StatePolicy, copy, export, restore
from jaxspec.models.base import ForwardOutput, Model
from jaxspec.pallas import row_tiles
from jaxspec.pallas.norm import mailbox as mailboxes
from jaxspec.pallas.norm.mailbox import Mailbox
from jaxspec.parallel import Group
from jaxspec.plan.plan import (
    EXPORT,
    MASKS,
    AfterForwardPass,
    AnyProgram,
    CopyBlock,
    ExportState,
    ForwardPass,
    MoveRows,
    Program,
    WriteAutomaton,
    WriteMasks,
    WriteProcessorArgs,
    WriteSampling,
    WriteTables,
    output_layout,
    plan_layout,
)
from jaxspec.plan.step_shapes import StepShapes
from jaxspec.proposers.base import Drafts, Proposer
from jaxspec.regions import DecodeRegion
from jaxspec.runner.batch_state import BatchState, EngineState
from jaxspec.runner.device_plan import DevicePlan
from jaxspec.runner.draft_inputs import draft_inputs
from jaxspec.runner.logprobs import prompt_logprobs
from jaxspec.runner.output import DeviceOutput, pack_output
from jaxspec.runner.prepare import StepInputs, prepare
from jaxspec.runner.programs import LOOP_OPTIONS, XLA_OPTIONS
from jaxspec.runner.propose import allowed_drafts, num_dropped, propose
from jaxspec.runner.remap import (
    remap,
    scatter_new_rows,
    update_page_tables,
    write_page_tables,
)
from jaxspec.runner.tables import grammar_state_after, stop_ids, with_chunks, with_verified
from jaxspec.runner.token_tiles import forward_in_tiles
from jaxspec.runner.update import truncate_at_stop, update
from jaxspec.runner.verify import verify
from jaxspec.sampling import NO_TOKEN, Verifier


@dataclasses.dataclass(frozen=True)
class StepConfig:
    """Static inputs of all programs of an engine, closed over by them and never traced."""

    shapes: StepShapes
    model: nnx.GraphDef
    weights: Any  # PyTreeDef of the model's `nnx.State`; a step takes the leaves
    proposer: Proposer | None  # None means plain decoding, K = 0
    verifier: Verifier
    specs: tuple[CacheSpec, ...]  # specs of the state's pools
    states: StatePolicy
    group: Group = dataclasses.field(default_factory=Group)  # devices that run each program
    mailbox: Mailbox | None = None  # of each device; None if all-reduces sum
    matmul_precision: str | None = None  # None means JAX's default
    is_deterministic: bool = False  # a token's logits have the same bits in any step

    @property
    def jit_options(self) -> dict[str, Any]:
        """Keyword arguments of `jax.jit` for all programs: the state is donated."""
        options = LOOP_OPTIONS if self.is_deterministic else XLA_OPTIONS
        return {"donate_argnums": 2, "compiler_options": options}

    @contextlib.contextmanager
    def arithmetic(self) -> Iterator[None]:
        """Trace matmuls in the engine's precision, and rows in tiles if it is deterministic."""
        with contextlib.ExitStack() as settings:
            settings.enter_context(jax.default_matmul_precision(self.matmul_precision))
            if self.is_deterministic:
                settings.enter_context(row_tiles.deterministic())
            yield


_jitted = weakref.WeakValueDictionary[tuple[StepConfig, AnyProgram], jax.stages.Wrapped]()


def jitted_step(config: StepConfig, program: AnyProgram) -> jax.stages.Wrapped:
    """Return `make_step` jitted with a donated state; open engines with equal configs share it.

    What JAX compiled for it is freed with the last engine that holds it.
    """
    step = _jitted.get((config, program))
    if step is None:
        step = _jitted[config, program] = new_step(config, program)
    return step


def new_step(config: StepConfig, program: AnyProgram) -> jax.stages.Wrapped:
    """Return `make_step` jitted with a donated state, shared with no engine.

    In a group each device runs the step on its part of the model and of the pools, with the plan as
    a whole. The output is the same on all of them.
    """
    step = make_step(config, program)
    if config.mailbox is not None:
        step = _with_mailbox(step, config.mailbox)
    step = config.group.on_each(step, whole=3, equal=(False, True))
    return jax.jit(step, **config.jit_options)


def _with_mailbox(step: Callable[..., Any], mailbox: Mailbox) -> Callable[..., Any]:
    """Return `step` with the device's `MailboxArgs` beside the tables."""

    @functools.wraps(step)
    def with_mailbox(weights: Any, given: Any, state: EngineState, packed: Any) -> Any:
        tables, mailbox_args = given
        with mailboxes.use(mailbox, mailbox_args):
            return step(weights, tables, state, packed)

    return with_mailbox


def make_step(
    config: StepConfig, program: AnyProgram
) -> Callable[..., tuple[EngineState, DeviceOutput]]:
    """Return the function `step(weights, tables, state, packed_plan) -> (state, output)`.

    Its arguments are the leaves of `config.weights`, the drafter tables, an `EngineState` to be
    donated, and the packed plan, int32 `[size]` (`plan_layout`). The output is in pinned host
    memory; its rows are the decode rows and then the prompts.
    """
    match program:
        case ForwardPass():
            return _make_forward_pass(config, program)
        case AfterForwardPass():
            return _make_rest(config, program)
        case Program():
            return _make_step(config, program)
        case MoveRows():
            return _make_moves(config, program)
        case WriteTables() | WriteMasks() | WriteAutomaton() | WriteProcessorArgs():
            return _make_write(config, program)
        case ExportState():
            return _make_export(config)
        case CopyBlock():
            raise TypeError("A block is copied by the programs of runner.blocks.BlockCopies.")


def _make_forward_pass(
    config: StepConfig, program: ForwardPass
) -> Callable[..., tuple[EngineState, DeviceOutput]]:
    def forward_pass(
        weights: Any, tables: Any, state: EngineState, packed: Int[Array, " plan"]
    ) -> tuple[EngineState, DeviceOutput]:
        plan = DevicePlan.unpack(packed, program, config.shapes)
        with config.arithmetic():
            model = _model(config, weights)
            state = _place_rows(config, state, plan)
            if config.mailbox is not None:
                state = _joined(state)
            _, output, pools = _forward(config, program.rest, model, plan, state)
        # Not `kept.at[:n].set`: XLA of jax 0.11.2 crashes on its scatter over several devices.
        write = functools.partial(jax.lax.dynamic_update_slice_in_dim, start_index=0, axis=0)
        forward = jax.tree.map(write, state.forward, output)
        return dataclasses.replace(state, pools=pools, forward=forward), _no_output(config)

    forward_pass.__name__ = f"forward_pass_{program.decode_rows}_{program.num_drafts}"
    return forward_pass


def _joined(state: EngineState) -> EngineState:
    """Return an equal state that needs a collective of XLA.

    XLA then loads the program on all devices before one of them spins in a mailbox.
    """
    negative = jnp.minimum(parallel.reduce(state.rows.slot[0]), 0)  # slots are 0 or more
    rows = state.rows.with_fields(slot=state.rows.slot + negative)
    return dataclasses.replace(state, rows=rows)


def _make_rest(
    config: StepConfig, program: AfterForwardPass
) -> Callable[..., tuple[EngineState, DeviceOutput]]:
    def rest(
        weights: Any, tables: Any, state: EngineState, packed: Int[Array, " plan"]
    ) -> tuple[EngineState, DeviceOutput]:
        plan = DevicePlan.unpack(packed, program, config.shapes)
        with config.arithmetic():
            model = _model(config, weights)
            inputs = _prepare(config, program, plan, state)
            num_tokens = len(inputs.model.tokens)
            output = jax.tree.map(lambda kept: kept[:num_tokens], state.forward)
            state, reported = _after_forward(
                config, program, model, tables, plan, inputs, output, state
            )
        reported = jax.tree.map(lambda each: each[None], reported)  # of one step
        return state, jax.device_put(reported, jax.memory.Space.Host)

    rest.__name__ = f"after_forward_pass_{program.decode_rows}_{program.num_drafts}"
    return rest


def _make_step(
    config: StepConfig, program: Program
) -> Callable[..., tuple[EngineState, DeviceOutput]]:
    def step(
        weights: Any, tables: Any, state: EngineState, packed: Int[Array, " plan"]
    ) -> tuple[EngineState, DeviceOutput]:
        plan = DevicePlan.unpack(packed, program, config.shapes)
        with config.arithmetic():
            model = _model(config, weights)
            state, output = jax.lax.scan(
                lambda state, _: _one_step(config, program, model, tables, plan, state),
                _place_rows(config, state, plan),
                length=program.num_steps,
                unroll=program.num_steps == 1,  # no loop for a single step
            )
        # The step writes its output to pinned host memory, so the host needs no separate copy. An
        # output on the device would get a new buffer in each step, among XLA's temporaries, and a
        # CUDA graph must be updated wherever an address has changed.
        return state, jax.device_put(output, jax.memory.Space.Host)

    # Name in profiles and compilation logs.
    times = f"_{program.num_steps}_times" if program.num_steps > 1 else ""
    shape = "_".join(map(str, program.shape))
    step.__name__ = f"step_{shape}_{program.features}{times}"
    return step


def _make_moves(
    config: StepConfig, program: MoveRows
) -> Callable[..., tuple[EngineState, DeviceOutput]]:
    def moves(
        weights: Any, tables: Any, state: EngineState, packed: Int[Array, " plan"]
    ) -> tuple[EngineState, DeviceOutput]:
        plan = DevicePlan.unpack(packed, program, config.shapes)
        state = _place_rows(config, state, plan)
        sources, targets, pools = plan.source_slots, plan.target_slots, state.pools
        if program.restores:
            assert state.checkpoints is not None  # only engines with checkpoints plan restores
            pools = restore(config.specs, pools, state.checkpoints, sources, targets)
            sources = targets = jnp.zeros_like(targets)
        moves = Moves(sources, targets, plan.source_pages, plan.target_pages)
        pools = copy(config.specs, pools, moves)
        seen = state.tables.seen
        if seen is not None:
            seen = seen.copied(plan.source_slots, plan.target_slots)
        state = dataclasses.replace(
            state,
            page_tables=write_page_tables(state.page_tables, plan),
            pools=pools,
            tables=dataclasses.replace(state.tables, seen=seen),
        )
        return state, _no_output(config)

    moves.__name__ = "restore" if program.restores else "moves"
    return moves


def _make_write(
    config: StepConfig, program: WriteSampling
) -> Callable[..., tuple[EngineState, DeviceOutput]]:
    """Return the program that writes parts of the sampling tables."""

    def write(
        weights: Any, tables: Any, state: EngineState, packed: Int[Array, " plan"]
    ) -> tuple[EngineState, DeviceOutput]:
        bias, automata = state.tables.bias, state.tables.automata
        match program:
            case WriteTables():
                assert bias is not None  # programs with BIAS have bias tables
                written = {"bias": bias.with_slot(packed)}
            case WriteMasks():
                assert bias is not None
                fields = plan_layout(MASKS, config.shapes).unpack(packed)
                written = {"bias": bias.with_masks(**fields)}
            case WriteAutomaton():
                assert automata is not None  # an argument of this program
                written = {"automata": automata.written(packed)}
            case WriteProcessorArgs():
                processors = state.tables.processors
                assert processors is not None
                written = {"processors": processors.with_slot(packed, config.shapes)}
        sampling = dataclasses.replace(state.tables, **written)
        return dataclasses.replace(state, tables=sampling), _no_output(config)

    write.__name__ = type(program).__name__  # in profiles and compilation logs
    return write


def _make_export(config: StepConfig) -> Callable[..., tuple[EngineState, DeviceOutput]]:
    """Return the program that saves the state of one row, and copies its partly filled page."""

    def export_state(
        weights: Any, tables: Any, state: EngineState, packed: Int[Array, " plan"]
    ) -> tuple[EngineState, DeviceOutput]:
        plan = plan_layout(EXPORT, config.shapes).unpack(packed)
        one = {name: value[None] for name, value in plan.items()}
        row = state.rows.take(one["row"])
        region = DecodeRegion(
            slots=row.slot,
            num_computed=row.num_computed,
            query_len=jnp.ones_like(row.slot),
            state_offset=row.state_offset,
            ring_length=row.ring_length,
        )
        model = _model(config, weights)
        states = model.states(state.pools, region)
        if config.proposer is not None:
            states |= config.proposer.states(state.pools, region, tables)
        assert state.checkpoints is not None
        kept = SavedState(region, one["checkpoint"])
        nothing = jnp.zeros_like(row.slot)
        pages = one["source_page"], one["target_page"]
        state = dataclasses.replace(
            state,
            pools=copy(config.specs, state.pools, Moves(nothing, nothing, *pages)),
            checkpoints=export(config.specs, state.pools, state.checkpoints, kept, states),
        )
        return state, _no_output(config)

    return export_state


def _model(config: StepConfig, weights: Any) -> Model:
    return nnx.merge(config.model, jax.tree.unflatten(config.weights, weights))


def _no_output(config: StepConfig) -> DeviceOutput:
    size = output_layout(config.shapes.num_drafts).size
    return DeviceOutput(jnp.zeros((0, 0, size), jnp.int32))


def _place_rows(config: StepConfig, state: EngineState, plan: DevicePlan) -> EngineState:
    """Return the state with the plan's rows in place and its pages appended."""
    entries = BatchState(plan.new_rows)
    new_rows = scatter_new_rows(plan.new_row_index, entries, config.shapes.max_num_seqs)
    return dataclasses.replace(
        state,
        rows=remap(state.rows, plan.prev_positions, new_rows),
        page_tables=update_page_tables(state.page_tables, new_rows, plan),
    )


def _one_step(
    config: StepConfig,
    program: Program,
    model: Model,
    tables: Any,
    plan: DevicePlan,
    state: EngineState,
) -> tuple[EngineState, DeviceOutput]:
    """Run a forward pass, verify its drafts, and make those of the next step; rows do not move."""
    inputs, output, pools = _forward(config, program, model, plan, state)
    state = dataclasses.replace(state, pools=pools)
    return _after_forward(config, program, model, tables, plan, inputs, output, state)


def _forward(
    config: StepConfig, program: Program, model: Model, plan: DevicePlan, state: EngineState
) -> tuple[StepInputs, ForwardOutput, Pools]:
    inputs = _prepare(config, program, plan, state)
    taps = () if config.proposer is None else config.proposer.taps
    if config.is_deterministic:
        page_size = config.shapes.page_size
        result = forward_in_tiles(model, inputs.model, state.pools, taps, page_size=page_size)
        return inputs, *result
    return inputs, *model.forward(inputs.model, state.pools, taps)


def _prepare(
    config: StepConfig, program: Program, plan: DevicePlan, state: EngineState
) -> StepInputs:
    return prepare(state.rows, state.page_tables, plan, config.shapes.page_size, program)


def _after_forward(
    config: StepConfig,
    program: Program,
    model: Model,
    tables: Any,
    plan: DevicePlan,
    inputs: StepInputs,
    output: ForwardOutput,
    state: EngineState,
) -> tuple[EngineState, DeviceOutput]:
    """Verify the drafts of a forward pass, and make those of the next step."""
    # Without prompt tokens every position is scored: skip the gather, which XLA makes a copy.
    hidden = output.hidden
    scored = hidden if inputs.model.prefill is None else hidden[inputs.logits_indices]
    sampling, features = with_chunks(state.tables, inputs), program.features
    acceptance, logprobs = verify(
        model, scored, inputs, state.draft_logits, config.verifier, features, sampling
    )
    acceptance, finish = truncate_at_stop(
        acceptance,
        inputs.active,
        inputs.first_position,
        inputs.produces_token,
        stop_ids(sampling, inputs.active),
    )
    active = update(inputs.active, acceptance, finish, plan.prefill_lens, config.states)
    changed = grammar_state_after(inputs, sampling, acceptance)
    draft_logits, pools = state.draft_logits, state.pools
    if config.proposer is not None:
        proposer_inputs = draft_inputs(output, inputs, acceptance, active, plan, features)
        with row_tiles.deterministic(False):  # drafts decide only what is verified
            drafts, pools = propose(config.proposer, model, proposer_inputs, pools, tables)
        drafts = allowed_drafts(drafts, proposer_inputs, sampling.automata, **changed)
        changed["drafts"] = _widened(drafts.tokens, config.shapes.num_drafts)
        changed["num_drafts"] = drafts.num_drafts
        draft_logits = _with_distributions(draft_logits, drafts, active.slot)

    active = active.with_fields(**changed)
    packed = pack_output(
        output_layout(config.shapes.num_drafts),
        tokens=_widened(acceptance.tokens, config.shapes.width),
        num_drafts=inputs.num_draft_tokens,
        num_accepted=acceptance.num_accepted,
        finish=finish,
        num_dropped=num_dropped(inputs),
        next_drafts=active.drafts,
    )
    reported = DeviceOutput(
        packed,
        logprobs,
        prompt_logprobs(model, hidden, inputs, acceptance, features),
    )
    state = dataclasses.replace(
        state,
        rows=state.rows.put(inputs.index, active),
        pools=pools,
        draft_logits=draft_logits,
        tables=with_verified(sampling, inputs, acceptance),
    )
    return state, reported


def _with_distributions(
    draft_logits: Float[Array, "slots drafts vocab"] | None,
    drafts: Drafts,
    slots: Int[Array, " rows"],
) -> Float[Array, "slots drafts vocab"] | None:
    """Store the logits of sampled drafts in the slots of their rows."""
    if draft_logits is None or drafts.logits is None:
        return draft_logits
    where = jnp.where(slots > 0, slots, len(draft_logits))
    made = where[:, None], jnp.arange(drafts.logits.shape[1])
    return draft_logits.at[made].set(drafts.logits, mode="drop")


def _widened(tokens: Int[Array, "rows some"], columns: int) -> Int[Array, "rows columns"]:
    """Pad `tokens` with -1 to the number of columns of the widest program."""
    padding = (0, 0), (0, columns - tokens.shape[1])
    return jnp.pad(tokens, padding, constant_values=NO_TOKEN)
