import itertools

import pytest
from pairwise import cover, crossed, pairwise


@pytest.mark.parametrize("sizes", [(2,), (2, 3), (2, 2, 2), (3, 3, 3, 3), (4, 3, 2, 5), (1, 4, 1)])
def test_all_values_of_any_two_axes_meet_in_few_rows(sizes):
    axes = [[f"{axis}{value}" for value in range(size)] for axis, size in enumerate(sizes)]
    rows = pairwise(*axes)
    assert set(rows) <= set(itertools.product(*axes)) and len(set(rows)) == len(rows)
    for first, second in itertools.combinations(range(len(axes)), 2):
        met = {(row[first], row[second]) for row in rows}
        assert met == set(itertools.product(axes[first], axes[second]))
    assert {row[0] for row in rows} == {*axes[0]}
    widest = sorted((1, *sizes))[-2:]
    assert len(rows) <= 1.6 * widest[0] * widest[-1]


def test_a_cross_has_every_row_once_and_a_cover_of_it_is_quick():
    axes = "ab", "cd", "ef"
    quick = [row for row in crossed(*axes) if isinstance(row, tuple) and not hasattr(row, "marks")]
    rest = [row.values for row in crossed(*axes) if hasattr(row, "marks")]
    assert quick == pairwise(*axes)
    assert sorted([*quick, *rest]) == sorted(itertools.product(*axes))


def test_a_cover_has_the_cases_with_most_new_values_first():
    cases = [{"a"}, {"a", "b"}, {"b", "c"}, {"d"}, {"a"}]
    assert cover(cases, 3) == [1, 2, 3] and cover(cases, 9) == [1, 2, 3, 0, 4]


@pytest.mark.few(3)
@pytest.mark.parametrize("second", [4, 5, 6])
@pytest.mark.parametrize("first", [1, 2, 3])
def test_few_cases_of_stacked_parametrizations_have_all_values(request, first, second):
    is_quick = request.node.get_closest_marker("soak") is None
    assert is_quick == (second == first + 3)
