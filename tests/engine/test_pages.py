"""The pool of pages: counts, and a check that sees what is wrong."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ropewalk.engine.pages import PagePool, pages_for


@pytest.mark.parametrize(("tokens", "pages"), [(0, 0), (1, 1), (15, 1), (16, 1), (17, 2), (32, 2), (33, 3)])
def test_pages_for(tokens, pages):
    assert pages_for(tokens) == pages


def test_a_shared_page_is_free_after_its_last_release():
    pool = PagePool(4)
    table = pool.allocate(2)
    pool.share(table[:1])
    pool.check([table, table[:1]])
    pool.release(table)
    assert pool.n_free == 3
    pool.check([table[:1]])
    pool.release(table[:1])
    assert pool.n_free == 4
    pool.check([])


def test_misuse_is_refused():
    pool = PagePool(2)
    with pytest.raises(ValueError, match="3 pages wanted, 2 of 2 are free"):
        pool.allocate(3)
    with pytest.raises(ValueError, match="page 0 is free already"):
        pool.release([0])
    with pytest.raises(ValueError, match="page 1 is free and cannot be shared"):
        pool.share([1])


def test_check_sees_lost_doubled_and_miscounted_pages():
    pool = PagePool(3)
    table = pool.allocate(1)
    with pytest.raises(AssertionError, match="page 0 has 1 references and is in 0 tables"):
        pool.check([])
    with pytest.raises(AssertionError, match="page 0 has 1 references and is in 2 tables"):
        pool.check([table, table])
    pool._blank.append(0)
    with pytest.raises(AssertionError, match="page 0 has 1 references and is 1 times in the free list"):
        pool.check([table])
    pool._blank[:] = [1]
    with pytest.raises(AssertionError, match="page 2 has 0 references and is 0 times in the free list"):
        pool.check([table])


@given(st.lists(st.tuples(st.sampled_from(["allocate", "share", "release"]), st.integers(0, 5)), max_size=60))
def test_any_sequence_of_calls_keeps_the_books(calls):
    pool, tables = PagePool(7), []
    for call, number in calls:
        if call == "allocate" and number <= pool.n_free:
            tables.append(pool.allocate(number))
        elif tables and call == "share":
            tables.append(list(tables[number % len(tables)]))
            pool.share(tables[-1])
        elif tables and call == "release":
            pool.release(tables.pop(number % len(tables)))
        pool.check(tables)
