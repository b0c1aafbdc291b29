import dataclasses

import pytest
from fake_device import make_buckets, make_group

from jaxspec.options import METHODS, SpeculativeConfig
from jaxspec.plan.plan import MOVES, Program, plan_layout
from jaxspec.requests.sampling_features import GREEDY
from jaxspec.scheduler.automaton_pool import AutomatonPool
from jaxspec.scheduler.host_drafter import (
    HOST_DRAFTERS,
    HostDrafter,
    Path,
    make_host_drafter,
    path_fields,
    path_length,
)
from jaxspec.scheduler.packing import pack_step

PROGRAM = Program(2, 0, GREEDY)


class Counting(HostDrafter):
    """Expects the numbers behind a request's last token."""

    def path(self, request, length):
        newest = request.tokens[-1]
        return Path(range(newest + 1, newest + 1 + min(length, request.seed)), match=request.seed)


def test_only_methods_of_the_host_have_paths():
    assert HOST_DRAFTERS.keys() <= METHODS.keys()
    needed = {
        "draft_model": {"model": "a"},
        "eagle3": {"model": "a"},
        "assistant": {"model": "a"},
        "extract_hidden_states": {"layers": [0], "folder": "a"},
        "custom": {"proposer": "a:B"},
    }
    for method in METHODS.keys() - HOST_DRAFTERS.keys():
        config = SpeculativeConfig(method, options=needed.get(method))
        assert path_length(config, 2, 4) == 0 and make_host_drafter(config) is None
    assert path_length(None, 2, 4) == 0 and make_host_drafter(None) is None


@pytest.mark.parametrize(
    ("drafts", "in_flight", "steps", "want"),
    [(3, 0, 1, 7), (3, 2, 1, 15), (8, 2, 2, 62), (8, 3, 4, 64)],
)
def test_a_path_covers_what_is_in_flight_and_the_drafts_behind_it(drafts, in_flight, steps, want):
    assert path_length(SpeculativeConfig("suffix", drafts), in_flight, steps) == want


def test_a_plan_has_the_path_of_each_row_that_works():
    shapes = make_buckets(num_drafts=2, path_length=4)
    rows = [make_group(seed, 3, 9)[0] for seed in (0, 2, 9)]
    for slot, request in enumerate(rows, 1):
        request.slot, request.tokens = slot, [slot, slot]
    others = {"prefills": [], "drafter": Counting(), "automata": AutomatonPool()}
    plan = pack_step(PROGRAM, shapes, rows=rows, num_decode=2, **others)
    fields = plan_layout(PROGRAM, shapes).unpack(plan.packed)
    assert fields["paths"][:3].tolist() == [[-1] * 4, [3, 4, -1, -1], [0] * 4]
    assert fields["path_from"][:3].tolist() == [2, 2, 0]
    assert fields["path_match"][:3].tolist() == [0, 2, 0]


def test_engines_without_paths_have_the_same_plans_as_before_there_were_any():
    shapes = make_buckets(num_drafts=2)
    layout = plan_layout(PROGRAM, shapes)
    assert not any("path" in name for name in layout.fields)
    assert path_fields(Counting(), make_group(3, 3, 9), shapes, PROGRAM) == {}
    wanting = dataclasses.replace(shapes, path_length=4)
    assert plan_layout(PROGRAM, wanting).size == layout.size + shapes.max_num_seqs * (4 + 2)
    assert plan_layout(MOVES, wanting).size == plan_layout(MOVES, shapes).size
