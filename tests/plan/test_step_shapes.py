import pytest

from jaxspec.plan.scheduler_limits import SchedulerLimits, default_sizes
from jaxspec.plan.step_shapes import StateConfig, StepShapes

DEFAULTS = {
    "max_num_seqs": 8,
    "max_model_len": 100,
    "page_size": 16,
    "draft_buckets": (3,),
    "num_pages": None,
    "decode_rows": None,
    "prefill_tokens": None,
    "max_num_batched_tokens": None,
    "max_prefill_seqs": 4,
}
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
    ("max_num_seqs", "sizes"),
    [(1, (1,)), (2, (1, 2)), (4, (1, 4)), (8, (1, 4, 8)), (64, (1, 4, 16, 64))],
)
def test_default_decode_buckets_end_in_all_rows(max_num_seqs, sizes):
    buckets, limits = default_sizes(**DEFAULTS | {"max_num_seqs": max_num_seqs})
    assert buckets.decode_rows == sizes
    assert buckets.num_pages == 7 * max_num_seqs + 1
    assert limits.max_num_batched_tokens == 512 + 4 * max_num_seqs


@pytest.mark.parametrize(
    ("budget", "sizes"),
    [
        (7, (7,)),
        (64, (64,)),
        (600, (64, 600)),
        (2047, (64, 2047)),
        (2048, (64, 256, 512, 2048)),
        (2049, (64, 256, 512, 2048, 2049)),
    ],
)
def test_default_prefill_buckets_end_in_the_budget_that_is_given(budget, sizes):
    sizes_given = DEFAULTS | {"max_num_seqs": 1, "max_num_batched_tokens": budget}
    assert default_sizes(**sizes_given)[0].prefill_tokens == sizes


@pytest.mark.parametrize(
    ("tokens_per_step", "max_model_len", "sizes"),
    [
        (512, 8192, (64, 512)),
        (4096, 8192, (64, 256, 512, 2048, 4096)),
        (2560, 8192, (64, 256, 512, 2048, 2560)),
        (4096, 500, (64, 256, 512, 2048)),  # what 4 prompts may have, in full 64s
        (4096, 10, (64, 512)),
    ],
)
def test_a_model_has_its_own_default_of_tokens_a_step(tokens_per_step, max_model_len, sizes):
    own = {"tokens_per_step": tokens_per_step, "max_model_len": max_model_len}
    shapes, limits = default_sizes(**DEFAULTS | own)
    verify = 8 * 4  # of all rows, beside which there is room for the prompts
    assert (shapes.prefill_tokens, limits.max_num_batched_tokens) == (sizes, sizes[-1] + verify)
    alone, limits = default_sizes(**DEFAULTS | own | {"max_prefill_seqs": 1})
    longest = max(512, min(tokens_per_step, -(-max_model_len // 64) * 64))
    assert alone.prefill_tokens[-1] == longest == limits.max_num_batched_tokens - verify
    given, _ = default_sizes(**DEFAULTS | own | {"max_num_batched_tokens": 300})
    assert given.prefill_tokens == (64, 300)
    many = {"max_num_seqs": 1000, "max_num_batched_tokens": None}
    assert default_sizes(**DEFAULTS | own | many)[0].prefill_tokens == sizes


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
    buckets, _ = default_sizes(**DEFAULTS | {"prefill_tokens": sizes})
    assert buckets.well_filled(due) == computed


def test_what_is_given_is_no_default():
    given = {"decode_rows": [2, 8], "prefill_tokens": [16], "num_pages": 9}
    buckets, _ = default_sizes(**DEFAULTS | given)
    assert (buckets.decode_rows, buckets.prefill_tokens, buckets.num_pages) == ((2, 8), (16,), 9)
    _, many = default_sizes(**DEFAULTS | {"max_num_seqs": 100})
    assert many.max_num_batched_tokens == 512 + 100 * 4
    for name, option in (("decode_rows", "decode_buckets"), ("prefill_tokens", "prefill_buckets")):
        with pytest.raises(ValueError, match=f"{option} must ascend"):
            default_sizes(**DEFAULTS | {name: []})
    for budget in (0, 32):
        with pytest.raises(
            ValueError, match=f"max_num_batched_tokens={budget} must exceed .* = 32"
        ):
            default_sizes(**DEFAULTS | {"max_num_batched_tokens": budget})


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
