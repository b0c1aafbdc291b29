"""A slow, obvious device: it runs plans in NumPy and Python, and checks each against the laws."""

import dataclasses
from collections import deque

import numpy as np

from jaxspec.plan.block_plan import Write
from jaxspec.plan.plan import (
    BLOCK_COPIES,
    EXPORT,
    READ,
    READ_STATE,
    RESTORE,
    WRITES,
    Program,
    StateExport,
    StepOutput,
    output_layout,
    plan_layout,
)
from jaxspec.plan.row import row_layout
from jaxspec.plan.step_shapes import SchedulerLimits, StepShapes
from jaxspec.requests.request import Finish, Request
from jaxspec.requests.sampling_params import SamplingParams
from jaxspec.scheduler.scheduled_step import ScheduledStep
from jaxspec.scheduler.scheduler import Scheduler

JUNK = -99  # what the draft head leaves at positions whose tokens are not known yet
VOCAB = 50


def make_sizes(**changes):
    """Small shapes, and limits; `chunk` sets the prompt tokens of a step."""
    names = {field.name for field in dataclasses.fields(SchedulerLimits)}
    limits = {name: changes.pop(name) for name in names & changes.keys()}
    sizes = {
        "max_num_seqs": 5,
        "max_model_len": 40,
        "page_size": 4,
        "num_drafts": 0,
        "decode_rows": (1, 2, 5),
        "max_prefill_seqs": 3,
    }
    chunk = changes.pop("chunk", 16)
    sizes |= changes
    sizes.setdefault("num_pages", 1 + sizes["max_num_seqs"] * -(-40 // sizes["page_size"]))
    sizes.setdefault("prefill_tokens", tuple(sorted({min(4, chunk), chunk})))
    verified = sizes["max_num_seqs"] * (1 + sizes["num_drafts"])
    return StepShapes(**sizes), SchedulerLimits(max_num_batched_tokens=verified + chunk, **limits)


def make_buckets(**changes):
    shapes, _ = make_sizes(**changes)
    return shapes


def next_token(seed, position):
    """The token the sequential model gives the request of this seed at this position."""
    return (seed * 7919 + position * 104729 + seed * position * 31) % VOCAB


def make_group(seed, prompt_len, max_tokens, n=1, root=None, salt=None, **changes):
    """`n` samples of one prompt; sample i has the seed `seed + i`, no other request may.

    Prompts of one `root` begin alike: with that many tokens of a text.
    """
    prompt = tuple((seed * 13 + i * 5) % VOCAB for i in range(prompt_len))
    if root is not None:
        shared = tuple((i * i + 3 * i) % VOCAB for i in range(root))
        prompt = (shared + prompt)[:prompt_len]
    stop_ids = changes.pop("stop_ids", ())
    params = SamplingParams(n=n, max_tokens=max_tokens, **changes)
    group = []
    for sample in range(n):
        parent = group[0] if group else None
        key = seed + sample
        group.append(Request(prompt, params, key, stop_ids, key, parent, cache_salt=salt))
    return group


def expected_output(request):
    """What one token at a time gives: its tokens, and why it ends."""
    tokens = []
    while True:
        index = len(request.prompt) + len(tokens)
        tokens.append(next_token(request.seed, index))
        if tokens[-1] in request.stop_ids and len(tokens) > request.params.min_tokens:
            return tokens, Finish.STOP
        if len(tokens) == request.params.max_tokens:
            return tokens, Finish.LENGTH


def true_tokens(request, count):
    """The first `count` tokens of the request, those not yet emitted included."""
    own = [next_token(request.seed, i) for i in range(len(request.prompt), count)]
    return (list(request.prompt) + own)[:count]


@dataclasses.dataclass
class Row:
    """A row of the batch state, with the fields of `row_layout`."""

    request: Request
    fields: dict
    drafts: list = dataclasses.field(default_factory=list)
    finish: Finish = Finish.RUNNING

    @property
    def num_computed(self):
        return self.fields["num_computed"]


class FakeDevice:
    """Runs each plan at once. What the host may know of it is in the outputs alone.

    The tokens themselves are what its pages and states hold, so a page of another request, a
    stale one, or a wrong position gives a wrong context, and the check of it fails.
    """

    def __init__(self, buckets: StepShapes, requests: dict[int, Request], random, accuracy=0.6):
        """`requests` by their `proposer_key`, which is how a row is known; it may grow."""
        self.buckets, self.requests = buckets, requests
        self.random, self.accuracy = random, accuracy
        self.num_scheduled = 0  # tokens computed
        self.num_wasted = 0  # decode rows of requests that had finished
        self.num_forks = self.num_copied_pages = self.num_restores = self.num_exports = 0
        self.num_reads = self.num_writes = 0
        self.admitted: list[Request] = []  # in order of their first admission
        self.reset()
        self.log: list[tuple[list, list]] = []  # seeds that decoded; (seed, tokens) of prefills

    def reset(self):
        """Forget what runs: nothing of it may be seen again."""
        buckets = self.buckets
        self.rows: list[Row | None] = [None] * buckets.max_num_seqs
        self.tables = np.zeros((buckets.num_slots, buckets.pages_per_seq), np.int32)
        self.pages = np.full((buckets.num_pages, buckets.page_size), JUNK)
        self.states: list[tuple] = [()] * buckets.num_slots
        self.checkpoints: list[tuple | None] = [None] * (1 + buckets.num_checkpoints)
        self.begun: set[int] = set()  # slots that wait for what they begin on
        self.owner: dict[Request, int] = {}  # generation of each running request
        self.uncollected: deque[ScheduledStep] = deque()
        # What earlier weights computed, or was computed from that.
        self.old_rows: set[tuple[Request, int]] = set()  # with their generations
        self.old_pages = np.zeros(buckets.num_pages, bool)
        self.old_checkpoints: set[int] = set()

    def renew(self):
        """From now on weights are others: what is here is for the rows that have it alone."""
        self.old_rows |= set(self.owner.items())
        self.old_pages[:] = True
        self.old_checkpoints = set(range(1, 1 + self.buckets.num_checkpoints))

    def run(self, scheduler: Scheduler, step: ScheduledStep) -> StepOutput:
        """Carry out a plan that `scheduler` just gave."""
        plan = step.plan
        for each in (*plan.before, plan):
            values = plan_layout(each.program, self.buckets).unpack(each.packed)
            if each.program == EXPORT:
                self._export(values)
            elif each.program in BLOCK_COPIES:
                self._copy(each, values)
            elif each.program not in WRITES:
                self._place(values, scheduler, each.program)
        assert not self.begun, "a row with tokens computed that nobody computed for it"
        if plan.program in (EXPORT, *BLOCK_COPIES):
            self._check_pages(scheduler)
            self._check_prefixes(scheduler)
            self.uncollected.append(step)
            return StepOutput(*[np.zeros(0, np.int32)] * 6)  # nobody reads it
        self._check_order(values, step)
        self._check_pages(scheduler)
        num_decode = int(values["num_decode"])
        lens = values["prefill_lens"]
        first = plan.program.decode_rows if isinstance(plan.program, Program) else 0
        num_rows, drafts = first + len(lens), self.buckets.num_drafts
        outputs = [_empty_output(num_rows, drafts) for _ in range(plan.num_steps)]
        self.log.append(([], []))
        for row, entry in enumerate(step.decodes):
            self._check_needed(self.rows[row])
            for output in outputs:
                self._decode(row, output)
            emitted = sum(np.count_nonzero(output.tokens[row] != -1) for output in outputs)
            assert emitted <= entry.bound
        start = 0
        for seq, length in enumerate(lens[lens > 0]):
            tokens = values["prefill_tokens"][start : start + length]
            start += length
            self._prefill(
                num_decode + seq,
                tokens,
                values["next_prefill_tokens"][seq],
                *outputs,
                first + seq,
                step.prefills[seq],
            )
        for row in filter(None, self.rows):
            assert row.finish or row.num_computed < row.request.tokens_bound, "not a bound"
        self._check_prefixes(scheduler)
        self.uncollected.append(step)
        if not outputs:
            return StepOutput(*[np.zeros(0, np.int32)] * 6)  # nobody reads it
        names = output_layout(self.buckets.num_drafts).fields
        return StepOutput(**{n: np.stack([getattr(x, n) for x in outputs]) for n in names})

    def collected(self, step):
        """The scheduler was given this step's output."""
        assert self.uncollected.popleft() is step

    def num_uncollected(self, request, generation=None):
        """Steps the host has not heard of in which `request` must emit."""
        return sum(
            step.plan.num_steps
            * (entry.request is request)
            * (entry.bound > 0 and generation in (None, entry.generation))
            for step in self.uncollected
            for entry in step.decodes + step.prefills
        )

    # Rows.

    def _place(self, values, scheduler, program):
        self._remap(values, scheduler)
        self._update_tables(values)
        self._move(values, program)

    def _export(self, values):
        """A row's state and partial page, as they are after all earlier plans."""
        row, slot = self.rows[values["row"]], int(values["checkpoint"])
        assert row is not None and 0 < slot <= self.buckets.num_checkpoints
        assert row.num_computed == len(self.states[row.fields["slot"]])
        self.checkpoints[slot] = self.states[row.fields["slot"]]
        assert not self._is_old(row), "a state that earlier weights computed"
        self.old_checkpoints.discard(slot)
        self.num_exports += 1
        if values["target_page"]:
            self._copy_page(values["source_page"], values["target_page"])

    def _copy(self, plan, values):
        """A piece is filled with what is there now, or what it was filled with is put back."""
        piece, slot = plan.block, int(values["checkpoint"])
        assert values["block"] == piece.number and piece.is_state == plan.program.of_state
        if plan.program in (READ, READ_STATE):
            assert piece.arrays is None, "a piece is filled twice"
            self.num_reads += 1
            pages = [self.pages[page].copy() for page in values["sources"]]
            piece.arrays = pages, self.checkpoints[slot] if slot else None
            return
        self.num_writes += 1
        pages, state = piece.arrays
        for place, page in zip(values["sources"], values["targets"], strict=True):
            if page:
                self.pages[page], self.old_pages[page] = pages[place], False
        if slot:
            assert state is not None
            self.checkpoints[slot] = state
            self.old_checkpoints.discard(slot)

    def _is_old(self, row):
        return (row.request, row.request.generation) in self.old_rows

    def _copy_page(self, source, target):
        self.pages[target], self.old_pages[target] = self.pages[source], self.old_pages[source]

    def _check_new(self, row):
        """What a row begins on is of the same weights as what it computes."""
        pages = {self._where(row, position)[0] for position in range(row.num_computed)}
        assert not self.old_pages[list(pages)].any(), "keys and values of earlier weights"

    def _restore(self, row, source, slot):
        """The state that was kept, where states are; else the row's pages say where it stands."""
        self.num_restores += 1
        assert source not in self.old_checkpoints, "a state of earlier weights"
        self._check_new(row)
        if self.buckets.num_checkpoints:
            self.states[slot] = self.checkpoints[source]
        else:
            self.states[slot] = tuple(
                self.pages[self._where(row, position)] for position in range(row.num_computed)
            )
        assert len(self.states[slot]) == row.num_computed, "a state of another position"

    def _check_prefixes(self, scheduler):
        """What is kept is what the tree says; what the next plan copies first is left out."""
        prefixes = scheduler.prefixes.store
        exports = [copy for copy in prefixes.copies if isinstance(copy, StateExport)]
        writes = [copy for copy in prefixes.copies if isinstance(copy, Write)]
        coming = {export.target_page for export in exports}
        coming |= {page for write in writes for page in write.pages}
        slots = {copy.checkpoint for copy in (*exports, *writes)}
        for page, node in prefixes.tree._by_page.items():
            assert page == node.page and node.is_alive
            count = len(node.tokens)
            assert page in coming or tuple(self.pages[page][:count]) == node.tokens, "page changed"
            assert page in coming or not self.old_pages[page], "a page of earlier weights"
        pages_of_rows = {page for request in scheduler.running for page in request.pages}
        pending = [each for each in prefixes._pending.values()]
        assert not pages_of_rows & {page for each in pending for page in each.pages}
        for node in prefixes.states:
            text, above = (), node
            while above.parent is not None:
                text, above = above.tokens + text, above.parent
            slot = node.checkpoint
            assert slot in slots or self.checkpoints[slot] == text, "a state of another text"
        held = [node.checkpoint for node in prefixes.states] + prefixes.free_slots
        held += [each.slot for each in pending]
        assert sorted(held) == list(range(1, 1 + self.buckets.num_checkpoints))
        self._check_host(scheduler)

    def _check_host(self, scheduler):
        """Pieces hold the tokens by which they are found, and never change."""
        tier = scheduler.prefixes.tier
        if tier is None:
            return
        assert tier.index.num_bytes <= tier.max_bytes
        for piece in tier.index.blocks:
            pages, state = piece.arrays or ((), None)
            for place, (_, tokens) in enumerate(piece.keys if pages else ()):
                count = len(tokens)
                if piece.is_state:
                    assert state[len(state) - count :] == tokens, "another state"
                if not piece.is_state or count < self.buckets.page_size:
                    assert tuple(pages[place][:count]) == tokens, "another page"

    def _move(self, values, program):
        """Copies; and a row enters with tokens computed if and only if something is copied to it.

        The source is a row that stays, and has all that the new one is to start from, or what was
        kept of one.
        """
        new = [self.rows[index] for index in values["new_row_index"] if index >= 0]
        present = {row.fields["slot"]: row for row in self.rows if row is not None}
        self.begun |= {row.fields["slot"] for row in new if row.fields["num_computed"]}
        targets = {slot for slot in values["target_slots"].tolist() if slot}
        assert targets <= self.begun
        self.begun -= targets
        for source, target, source_page, target_page, table in zip(
            values["source_slots"],
            values["target_slots"],
            values["source_pages"],
            values["target_pages"],
            values["target_tables"],
            strict=True,
        ):
            if not target:
                continue
            row = present[target]
            self.tables[target] = table
            if program == RESTORE:
                if target_page:
                    self._copy_page(source_page, target_page)
                self._restore(row, source, target)
                continue
            self.num_forks += 1
            assert row.num_computed == len(row.request.prompt) - 1 == present[source].num_computed
            self.states[target] = self.states[source]
            own = table[table > 0][row.num_computed // self.buckets.page_size :].tolist()
            assert own == [target_page] * int(target_page > 0), "shared pages, then the partial one"
            assert (source_page > 0) == (target_page > 0)
            if target_page:
                self.num_copied_pages += 1
                assert self.tables[source][np.count_nonzero(table) - 1] == source_page
                self._copy_page(source_page, target_page)
            self._check_new(row)

    def _remap(self, values, scheduler):
        layout = row_layout(self.buckets.num_drafts)
        previous, old = values["prev_positions"], self.rows
        kept = previous[previous >= 0]
        assert len(set(kept)) == len(kept), "two rows come from one"
        self.rows = [old[before] if before >= 0 else None for before in previous]
        for place, index in enumerate(values["new_row_index"]):
            if index < 0:
                continue
            assert self.rows[index] is None, "a new row where another request moved"
            fields = {
                name: value.tolist()
                for name, value in layout.unpack(values["new_rows"][place]).items()
            }
            self.rows[index] = self._new_row(fields, scheduler)
        present = [row.request for row in self.rows if row is not None]
        assert present == [r.request for r in self.rows[: len(present)]], "rows with holes"
        assert sorted(map(id, present)) == sorted(map(id, scheduler.running))
        for row in filter(None, self.rows):
            # The device's owner is of this life of the request, and the host's slot is its own.
            assert self.owner[row.request] == row.request.generation
            assert row.fields["slot"] == row.request.slot
        self.owner = {request: request.generation for request in present}

    def _new_row(self, fields, scheduler):
        request = self.requests[fields["proposer_key"]]
        params, num_tokens = request.params, len(request.tokens)
        assert fields["seed"] == request.seed
        assert fields["prefill_len"] == num_tokens
        assert fields["last_token"] == request.tokens[-1]
        assert fields["max_len"] == len(request.prompt) + params.max_tokens
        assert fields["min_len"] == len(request.prompt) + params.min_tokens
        assert fields["top_k"] == params.top_k
        assert [i for i in fields["stop_ids"] if i >= 0] == list(request.stop_ids)
        for name in ("temperature", "top_p"):
            assert fields[name] == np.float32(getattr(params, name))
        assert (fields["state_offset"], fields["finish"], fields["num_drafts"]) == (0, 0, 0)
        assert set(fields["drafts"]) <= {-1}
        assert self.owner.get(request) != request.generation, "new although it was there"
        assert not self.num_uncollected(request), "admitted again before its outputs arrived"
        slot = fields["slot"]
        assert 0 < slot < self.buckets.num_slots
        keeps_prefixes = scheduler.limits.caches_prefixes
        assert not fields["num_computed"] or request.parent or keeps_prefixes
        assert fields["num_computed"] < fields["prefill_len"]
        self.tables[slot] = 0
        self.states[slot] = ()
        self.owner[request] = request.generation
        if request.generation == 1:
            self.admitted.append(request)
        return Row(request, fields)

    def _update_tables(self, values):
        appends = zip(
            values["append_slots"], values["append_indices"], values["append_pages"], strict=True
        )
        for slot, index, page in appends:
            if slot:
                assert page > 0 and self.tables[slot, index] == 0, "a page appended twice"
                self.tables[slot, index] = page

    def _check_order(self, values, step):
        entries = step.decodes + step.prefills
        assert len(step.decodes) == values["num_decode"]
        if isinstance(step.plan.program, Program):
            assert len(step.decodes) <= step.plan.program.decode_rows
        assert len(step.prefills) == np.count_nonzero(values["prefill_lens"])
        for row, entry in enumerate(entries):
            assert self.rows[row].request is entry.request
            assert entry.generation == entry.request.generation

    def _check_pages(self, scheduler):
        """The tables are the scheduler's, and only full pages of one text have several owners."""
        owners: dict[int, list] = {}
        for request in scheduler.running:
            table = self.tables[request.slot]
            assert table[: len(request.pages)].tolist() == request.pages
            assert not table[len(request.pages) :].any()
            for index, page in enumerate(request.pages):
                owners.setdefault(page, []).append((request, index))
        assert len(owners) + scheduler.pages.num_free == self.buckets.num_pages - 1
        for page, held in owners.items():
            assert page > 0
            if len(held) > 1:
                (first, index), *rest = held
                end = (index + 1) * self.buckets.page_size
                texts = {(tuple(true_tokens(r, end)), r.cache_salt, i) for r, i in held}
                assert len(texts) == 1 and end <= min(len(r.tokens) for r, _ in held)

    # Tokens.

    def _where(self, row, position):
        page = self.tables[row.fields["slot"], position // self.buckets.page_size]
        assert page > 0, f"no page for position {position}"
        return page, position % self.buckets.page_size

    def _compute(self, row, tokens):
        """Write tokens from `num_computed` on, and check that the context is the request's."""
        done, slot = row.num_computed, row.fields["slot"]
        truth = true_tokens(row.request, done + 1)
        assert self.states[slot] == tuple(truth[:done]), "a recurrent state of other tokens"
        for place, token in enumerate(tokens):
            self.pages[self._where(row, done + place)] = token
            self.old_pages[self._where(row, done + place)[0]] = self._is_old(row)
        context = [self.pages[self._where(row, p)] for p in range(done + 1)]
        assert context == truth, "keys and values of other tokens"
        self.num_scheduled += len(tokens)

    def _check_needed(self, row):
        self.log[-1][0].append(row.request.seed)
        sure = len(row.request.tokens) + self.num_uncollected(row.request)
        assert sure < row.fields["max_len"], "dispatched although it must have finished"

    def _decode(self, index, output):
        row, fields = self.rows[index], self.rows[index].fields
        output.finish[index] = row.finish
        if row.finish:
            self.num_wasted += 1
            return
        is_tail = row.num_computed < fields["prefill_len"] - 1
        assert not is_tail
        drafts = row.drafts[: max(fields["max_len"] - 2 - row.num_computed, 0)]
        self._compute(row, [fields["last_token"], *drafts])
        after = len(true_tokens(row.request, row.num_computed + 1))
        targets = [next_token(row.request.seed, after + j) for j in range(len(drafts) + 1)]
        accepted = 0
        while accepted < len(drafts) and drafts[accepted] == targets[accepted]:
            accepted += 1
        output.num_drafts[index] = len(drafts)
        self._emit(row, targets[: accepted + 1], accepted + 1, output, index)
        output.num_accepted[index] = np.count_nonzero(output.tokens[index] != -1) - 1

    def _prefill(self, index, tokens, next_prompt_token, output, place, entry):
        row, length = self.rows[index], len(tokens)
        self.log[-1][1].append((row.request.seed, length))
        assert not row.finish
        end = row.num_computed + length
        assert tokens.tolist() == true_tokens(row.request, end)[row.num_computed :]
        ends_prompt = end == row.fields["prefill_len"]
        assert end <= row.fields["prefill_len"]
        assert next_prompt_token == (-1 if ends_prompt else true_tokens(row.request, end + 1)[end])
        assert entry.bound == ends_prompt
        self._compute(row, tokens.tolist())
        emitted = [next_token(row.request.seed, end)] if ends_prompt else []
        self._emit(row, emitted, length, output, place)

    def _emit(self, row, tokens, num_valid, output, place):
        fields, request = row.fields, row.request
        done, fields["num_computed"] = row.num_computed, row.num_computed + num_valid
        first = done + num_valid - len(tokens) + 1
        stops = set(fields["stop_ids"]) - {-1}
        for j, token in enumerate(tokens):
            if token in stops and first + j >= fields["min_len"]:
                row.finish = Finish.STOP
            elif first + j == fields["max_len"] - 1:
                row.finish = Finish.LENGTH
            if row.finish:
                fields["num_computed"] -= len(tokens) - (j + 1)  # what follows is no part of it
                tokens = tokens[: j + 1]
                break
        output.tokens[place, : len(tokens)] = tokens
        output.finish[place] = row.finish
        truth = true_tokens(request, fields["num_computed"])
        self.states[fields["slot"]] = tuple(truth)
        row.drafts = []
        if tokens:
            fields["last_token"] = tokens[-1]
        if tokens and not row.finish:
            row.drafts = self._draft(row)

    def _draft(self, row):
        """Right or wrong by chance; the head's own passes leave junk at the positions ahead."""
        count = int(self.random.integers(0, self.buckets.num_drafts + 1))
        newest = row.num_computed
        for position in range(newest, newest + self.buckets.num_drafts - 1):
            if position < row.fields["max_len"]:
                self.pages[self._where(row, position)] = JUNK
        right = [next_token(row.request.seed, newest + 1 + j) for j in range(count)]
        wrong = self.random.random(count) >= self.accuracy
        return [int(t + w) % VOCAB for t, w in zip(right, wrong, strict=True)]


def _empty_output(rows, num_drafts):
    return StepOutput(
        tokens=np.full((rows, 1 + num_drafts), -1, np.int32),
        num_drafts=np.zeros(rows, np.int32),
        num_accepted=np.zeros(rows, np.int32),
        finish=np.zeros(rows, np.int32),
        num_dropped=np.zeros(rows, np.int32),
        next_drafts=np.full((rows, num_drafts), -1, np.int32),
    )
