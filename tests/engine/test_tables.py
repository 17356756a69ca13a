"""Page tables by themselves: which page is written, which is copied, which is taken over."""

from types import SimpleNamespace

import numpy as np
import pytest

from ropewalk.engine.pages import PagePool
from ropewalk.engine.prefix import PrefixCache
from ropewalk.engine.request import Request
from ropewalk.engine.tables import PageTables
from ropewalk.params import SamplingParams


@pytest.fixture
def tables():
    pool = PagePool(8)
    return PageTables(pool, PrefixCache(pool))


def pair(n_prompt):
    """Two completions of a prompt, with room for 30 tokens of output."""
    group = []
    for index in range(2):
        tokens = np.arange(n_prompt + 30, dtype=np.int32)
        group.append(
            Request(index, SamplingParams(), 0, frozenset(), tokens, n_prompt, n_prompt, index, group)
        )
    return group


def compute(tables, request, n_tokens):
    """As if these tokens had been drawn and computed."""
    request.n_tokens = max(request.n_tokens, n_tokens)
    assert tables.extend(request, n_tokens)
    copies = tables.take_copies()
    tables.commit(request, n_tokens - request.n_computed)
    request.n_tokens = max(request.n_tokens, n_tokens + 1)
    return copies


def test_a_page_that_is_kept_for_others_is_not_written_though_its_only_reader_is_alone(tables):
    """The page that a prompt ends in is full of the first completion's output when the second one takes it over."""
    first, second = pair(20)
    compute(tables, first, 40)
    assert tables.reuse(second) == 19
    assert second.nodes == first.nodes[:1]
    kept = first.pages[1]
    tables.drop(first)
    tables.check([second])
    assert second.pages[1] == kept
    assert tables.extend(second, 20)
    assert tables.take_copies() == [(kept, second.pages[1])]
    assert second.pages[1] != kept
    assert tables.prefix.n_pages == 2


def test_the_last_free_page_is_not_kept_any_more_rather_than_copied(tables):
    first, second = pair(20)
    compute(tables, first, 40)
    tables.reuse(second)
    page = first.pages[1]
    tables.drop(first)
    tables.pool.allocate(6)  # everybody else's
    assert tables.extend(second, 20)
    assert tables.take_copies() == []
    assert second.pages[1] == page
    assert (tables.prefix.n_pages, tables.pool.n_free) == (1, 0)


def test_two_that_share_a_page_copy_it_once(tables):
    first, second = pair(20)
    compute(tables, first, 20)
    tables.reuse(second)
    shared = first.pages[1]
    assert len(compute(tables, second, 20)) == 1
    assert compute(tables, first, 21) == []
    assert first.pages[1] == shared
    tables.check([first, second])


def test_what_is_missing_is_what_extending_takes(tables):
    first, second = pair(20)
    compute(tables, first, 20)
    tables.reuse(second)
    tables.pool.allocate(4)
    assert (tables.missing(second, 4), tables.pool.n_free) == (3, 2)  # two more pages, and a copy
    assert not tables.extend(second, 49)
    assert tables.extend(second, 48)
    assert tables.pool.n_free == 0


def test_a_page_from_disk_is_written_after_the_copies_from_the_page_that_was_there(tables):
    """A copy is queued, its source goes idle, and a page that is loaded in the same step takes its place."""
    done = []
    tables.shelf = SimpleNamespace(
        cache=SimpleNamespace(
            copy_pages=lambda pairs: done.append(list(pairs)), write_page=lambda page, _: done.append(page)
        ),
        store=SimpleNamespace(load=lambda key, i, text: "contents" if i == 0 else None),
        save=lambda *args: None,
    )
    first, second = pair(20)
    compute(tables, first, 40)
    tables.reuse(second)
    source = first.pages[1]
    tables.drop(first)
    assert tables.extend(second, 20)
    target = second.pages[1]
    tables.pool.allocate(5)  # everybody else's: only the source is left
    third, _ = pair(20)
    third.window[:] += 1
    assert tables.reuse(third, from_disk=True) == 16
    assert (third.pages, third.n_from_disk) == ([source], 16)
    assert done == [[(source, target)], source]
    assert tables.take_copies() == []


def test_check_sees_a_table_that_wastes_a_page(tables):
    (first, _) = pair(20)
    compute(tables, first, 20)
    first.pages += tables.pool.allocate(1)
    with pytest.raises(AssertionError):
        tables.check([first])
