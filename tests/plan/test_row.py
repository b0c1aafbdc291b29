"""The table of a row's fields: what a request that enters brings along, and where it lies."""

import numpy as np
import pytest

from jaxspec.plan import row
from jaxspec.plan.row import FIELDS, SAMPLING_FIELDS, RowField, row_layout, write_row
from jaxspec.requests.request import ROW_STOP_IDS, Request
from jaxspec.requests.sampling_params import SamplingParams


def written(num_drafts=2, stop_ids=(), **params):
    """The fields of a request that resumes: prompt 5 6 7, output 8, slot 4."""
    request = Request((5, 6, 7), SamplingParams(max_tokens=9, **params), 2**32 - 1, stop_ids)
    request.tokens, request.slot, request.prefill_len = [5, 6, 7, 8], 4, 4
    layout = row_layout(num_drafts)
    entry = np.full(layout.size, 77, np.int32)
    write_row(entry, request, layout)
    return {name: value.tolist() for name, value in layout.unpack(entry).items()}


def test_a_row_begins_as_its_request_says():
    penalties = {"presence_penalty": -1.5, "frequency_penalty": 0.5, "repetition_penalty": 1.25}
    chosen = {"temperature": 0.5, "top_k": 2**40, "top_p": 0.25, "min_p": 0.125}
    fields = written(stop_ids=(3, 9), min_tokens=2, **chosen, **penalties)
    assert fields == {
        "slot": 4,
        "prefill_len": 4,
        "max_len": 12,
        "num_computed": 0,
        "last_token": 8,
        "state_offset": 0,
        "ring_length": 0,
        "finish": 0,
        "seed": -1,  # the bits of 2**32 - 1
        "temperature": 0.5,
        "top_k": 2**31 - 1,
        "top_p": 0.25,
        "stop_ids": [3, 9] + [-1] * (ROW_STOP_IDS - 2),
        "min_len": 5,
        "prompt_len": 3,
        "table_slot": 0,
        "grammar_state": 0,
        "num_reported": 0,
        "reports_processed": 0,
        "min_p": 0.125,
        "presence_penalty": -1.5,
        "frequency_penalty": 0.5,
        "repetition_penalty": 1.25,
        "proposer_key": 0,
        "max_drafts": 2**31 - 1,
        "num_drafts": 0,
        "drafts": [-1, -1],
    }


@pytest.mark.parametrize(("asked", "most"), [(0, 0), (2, 2), (2**40, 2**31 - 1)])
def test_a_row_has_no_more_drafts_than_its_request_asks_for(asked, most):
    assert written(num_speculative_tokens=asked)["max_drafts"] == most


def test_a_row_names_its_tables_where_a_request_has_some():
    """Stop ids that it has no room for are there."""
    fields = written(stop_ids=tuple(range(17)))
    assert fields["stop_ids"] == [*range(16)] and fields["table_slot"] == 4
    assert written(logit_bias={5: 1})["table_slot"] == 4
    assert written(stop_ids=tuple(range(16)))["table_slot"] == 0


@pytest.mark.parametrize("mode", [None, "raw_logprobs", "processed_logprobs"])
def test_a_row_says_which_logprobs_it_reports(mode):
    assert written(logprobs_mode=mode)["reports_processed"] == (mode == "processed_logprobs")


def test_a_sequence_longer_than_its_field_is_refused(monkeypatch):
    longer = RowField("drafts", "Too long.", lambda r: (1, 2, 3), shape=("drafts",))
    monkeypatch.setattr(row, "FIELDS", (*FIELDS[:-1], longer))
    with pytest.raises(ValueError, match="room for 2 drafts, got 3"):
        written()


@pytest.mark.parametrize("num_drafts", [0, 1, 8])
def test_a_row_has_room_for_its_drafts_behind_fields_that_never_move(num_drafts):
    layout, plain = row_layout(num_drafts), row_layout(0)
    assert layout.size == plain.size + num_drafts
    assert {k: v for k, v in layout.slices.items() if k != "drafts"} == {
        k: v for k, v in plain.slices.items() if k != "drafts"
    }


def test_every_field_has_a_name_of_its_own_and_a_meaning():
    assert len(row_layout(0).fields) == len(FIELDS)
    assert all(field.meaning.endswith(".") for field in FIELDS)
    assert set(SAMPLING_FIELDS) <= set(FIELDS)


def test_a_minimum_beyond_the_room_is_the_room():
    """More tokens than a request may have would not fit the field, nor the bounds of a flight."""
    params = SamplingParams(max_tokens=None, min_tokens=2**40)
    request = Request((1, 2, 3), params, seed=0, room=64)
    entry = np.zeros(row_layout(0).size, np.int32)
    write_row(entry, request, row_layout(0))
    assert row_layout(0).read(entry, "min_len") == request.max_len == 64
