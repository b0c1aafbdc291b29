import numpy as np
import pytest

from jaxspec.prefix.page_pool import PagePool
from jaxspec.prefix.tree import PrefixTree


def pool_of(num_pages):
    return PagePool(num_pages, PrefixTree(1), list)


def test_pages_are_given_once_and_never_the_null_page():
    pool = pool_of(8)
    pages = pool.allocate(3) + pool.allocate(4)
    assert sorted(pages) == [1, 2, 3, 4, 5, 6, 7]
    assert pool.num_free == 0
    assert pool.allocate(0) == []


def test_more_pages_than_are_free_are_refused_and_none_is_taken():
    pool = pool_of(4)
    with pytest.raises(ValueError, match="4 pages asked for, 3 are free"):
        pool.allocate(4)
    assert sorted(pool.allocate(3)) == [1, 2, 3]


def test_a_shared_page_is_free_when_its_last_holder_lets_go():
    pool = pool_of(3)
    (page,) = pool.allocate(1)
    pool.share([page])
    pool.release([page])
    assert pool.num_free == 1
    pool.release([page])
    assert pool.num_free == 2
    assert sorted(pool.allocate(2)) == [1, 2]


def test_a_free_page_can_be_neither_shared_nor_released():
    pool = pool_of(3)
    (page,) = pool.allocate(1)
    pool.release([page])
    with pytest.raises(ValueError, match=f"Page {page} is released more often"):
        pool.release([page])
    with pytest.raises(ValueError, match=f"Page {page} is free"):
        pool.share([page])
    with pytest.raises(ValueError, match="Page 0"):
        pool.release([0])


@pytest.mark.parametrize("seed", range(5))
def test_references_equal_a_count_of_holders(seed):
    random = np.random.default_rng(seed)
    pool, holders = pool_of(12), []
    for _ in range(500):
        held = sorted({page for pages in holders for page in pages})
        choice = random.integers(3)
        if choice == 0 and pool.num_free:
            holders.append(pool.allocate(int(random.integers(1, pool.num_free + 1))))
        elif choice == 1 and held:
            shared = random.choice(held, int(random.integers(1, len(held) + 1)), replace=False)
            pool.share(shared.tolist())
            holders.append(shared.tolist())
        elif holders:
            pool.release(holders.pop(int(random.integers(len(holders)))))
        held = {page for pages in holders for page in pages}
        assert pool.num_free == 11 - len(held)
        assert 0 not in held
