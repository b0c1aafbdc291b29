import pytest

from jaxspec.plan.step_shapes import SchedulerLimits, StateConfig, StepShapes

SIZES = {
    "max_num_seqs": 8,
    "max_model_len": 100,
    "page_size": 16,
    "num_pages": 57,
    "num_drafts": 3,
    "decode_rows": (1, 4, 8),
    "prefill_tokens": (64, 480),
}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs must be an integer of at least 1, got 0"),
        ({"page_size": -1}, "page_size must be an integer of at least 1, got -1"),
        ({"page_size": 2.0}, "page_size must be an integer of at least 1, got 2.0"),
        ({"max_prefill_seqs": True}, "max_prefill_seqs must be an integer .* got True"),
        ({"max_model_len": 1}, "max_model_len must be at least 2"),
        ({"num_drafts": 16}, "num_speculative_tokens must be 0 to 15, got 16"),
        ({"num_drafts": -1}, "num_speculative_tokens must be 0 to 15, got -1"),
        ({"decode_rows": ()}, "decode_buckets must ascend"),
        ({"decode_rows": (4, 1, 8)}, r"decode_buckets must ascend .* got \(4, 1, 8\)"),
        ({"decode_rows": (0, 8)}, "decode_buckets must ascend from at least 1"),
        ({"prefill_tokens": (64, 64)}, "prefill_buckets must ascend"),
        ({"decode_rows": (1, 4)}, r"max_num_seqs=8, decode_buckets=\(1, 4\)"),
        ({"decode_rows": (8, 16)}, r"max_num_seqs=8, decode_buckets=\(8, 16\)"),
    ],
)
def test_sizes_that_cannot_work_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        StepShapes(**SIZES | changes)


@pytest.mark.parametrize(
    ("max_model_len", "page_size", "pages"), [(100, 16, 7), (96, 16, 6), (97, 16, 7), (5, 1, 5)]
)
def test_the_page_table_is_as_wide_as_the_longest_request(max_model_len, page_size, pages):
    buckets = StepShapes(**SIZES | {"max_model_len": max_model_len, "page_size": page_size})
    assert buckets.pages_per_seq == pages


@pytest.mark.parametrize("counts", [(), (0, 3), (0, 1, 3)])
def test_every_step_fits_the_smallest_compiled_shape_that_holds_it(counts):
    buckets = StepShapes(**SIZES | {"draft_buckets": counts})
    shapes = buckets.compiled()
    assert len(shapes) == len(set(shapes))
    for num_decode in range(9):
        for num_prefill in [0, 1, 63, 64, 65, 480]:
            if not num_decode + num_prefill:
                continue
            for asked in range(4):
                shape = rows, tokens, drafts = buckets.round_up(num_decode, num_prefill, asked)
                assert shape in shapes
                assert rows >= num_decode and tokens >= num_prefill and drafts >= asked
                assert (tokens == 0) == (num_prefill == 0), "the hot program has no prefill region"
                smaller = [
                    (r, t)
                    for r, t, k in shapes
                    if r >= num_decode
                    and num_prefill <= t
                    and k >= asked
                    and (t, r, k) < (tokens, rows, drafts)
                ]
                assert all(t == 0 for t in smaller) == (num_prefill == 0) or not smaller


def test_without_a_word_every_step_has_all_drafts():
    assert StepShapes(**SIZES).draft_buckets == (SIZES["num_drafts"],)
    assert {drafts for _, _, drafts in StepShapes(**SIZES).compiled()} == {SIZES["num_drafts"]}


@pytest.mark.parametrize("counts", [(1, 0, 3), (0, 1), (-1, 3), (3, 3)])
def test_draft_counts_ascend_to_those_of_the_widest_step(counts):
    with pytest.raises(ValueError, match="draft_buckets must ascend from at least 0 to 3"):
        StepShapes(**SIZES | {"draft_buckets": counts})


@pytest.mark.parametrize(
    ("sizes", "due", "computed"),
    [
        ((64, 512), 0, 0),
        ((64, 512), 1, 1),  # there is no smaller size
        ((64, 512), 64, 64),
        ((64, 512), 65, 64),
        ((64, 512), 256, 64),  # four steps
        ((64, 512), 257, 257),  # would be five
        ((64, 512), 512, 512),
        ((64, 256, 1024), 191, 64),
        ((64, 256, 1024), 192, 192),  # three quarters
        ((64, 256, 1024), 767, 256),
        ((64, 256, 1024), 768, 768),
    ],
)
def test_a_size_is_filled_by_three_quarters_or_the_one_below_is_filled(sizes, due, computed):
    buckets = StepShapes(**SIZES | {"prefill_tokens": sizes})
    assert buckets.well_filled(due) == computed


def test_limits_that_cannot_work_are_refused():
    for name in ("max_num_batched_tokens", "long_prefill_token_threshold", "checkpoint_interval"):
        with pytest.raises(ValueError, match=f"{name} must be an integer of at least 1, got -1"):
            SchedulerLimits(**{name: -1})
    for changes in ({"prefix_caching": "some"}, {"prefix_cache_share": 1.0}):
        with pytest.raises(
            ValueError, match="prefix_caching must be one of off, pages, align, all"
        ):
            SchedulerLimits(**changes)


@pytest.mark.parametrize("field", ["policy", "dtype"])
def test_an_unknown_state_policy_or_dtype_is_refused(field):
    with pytest.raises(ValueError, match=f"state_{field} must be .*, got 'float8'"):
        StateConfig(**{field: "float8"})


def test_states_are_replayed_where_kernels_run_unless_told():
    for policy, has_kernels, meant in (
        ("auto", True, "replay"),
        ("auto", False, "snapshot"),
        ("snapshot", True, "snapshot"),
        ("replay", False, "replay"),
    ):
        states = StateConfig.resolve(policy, "float16", has_kernels=has_kernels)
        assert states == StateConfig(meant, "float16")


@pytest.mark.parametrize("window", [0, -1, 2.5])
def test_a_window_is_a_number_of_tokens(window):
    with pytest.raises(ValueError, match=f"window must be an integer of at least 1, got {window}"):
        StateConfig("replay", window=window)
