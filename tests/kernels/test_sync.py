"""Sharing work: every item once, in runs; phases follow one another."""

import threading

import numpy as np
import pytest

from ropewalk.kernels.jit import kernel
from ropewalk.kernels.sync import MAX_HELPED, barrier, new_sync, next_of_run


@kernel
def take_all(tid, n_threads, words, counter, order):
    """Note in `order` the items that this thread got, as they came; the number of them."""
    n = 0
    item, turn = next_of_run(tid, n_threads, words, counter, order.size, 0)
    while item < order.size:
        order[n] = item
        n += 1
        item, turn = next_of_run(tid, n_threads, words, counter, order.size, turn)
    return n


@kernel
def take_in_phases(tid, n_threads, words, taken):
    """`taken` counts for [phase, counter, item] how often somebody got it."""
    n_items = taken.shape[2]
    for phase in range(taken.shape[0]):
        for counter in range(taken.shape[1]):
            item, turn = next_of_run(tid, n_threads, words, counter, n_items, 0)
            while item < n_items:
                taken[phase, counter, item] += 1
                item, turn = next_of_run(tid, n_threads, words, counter, n_items, turn)
        barrier(tid, words, n_threads)


def test_a_thread_begins_with_its_own_run_and_then_helps_the_others():
    words, order = new_sync(3), np.zeros(10, np.int64)
    assert take_all(1, 3, words, 0, order) == 10
    assert order.tolist() == [3, 4, 5, 6, 7, 8, 9, 0, 1, 2]  # runs are 0-2, 3-5 and 6-9
    assert take_all(0, 3, words, 0, order) == 0
    assert take_all(0, 3, words, 1, order) == 10


def test_help_is_for_a_few_neighbours():
    words, order = new_sync(20), np.zeros(40, np.int64)
    assert take_all(15, 20, words, 0, order) == 2 * MAX_HELPED
    assert order[: 2 * MAX_HELPED].tolist() == [30, 31, 32, 33, 34, 35, 36, 37, 38, 39, 0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("n_items", [1, 2, 7, 64])
def test_every_item_once_in_every_phase(n_items):
    words, taken = new_sync(3), np.zeros((200, 3, n_items), np.int32)
    threads = [threading.Thread(target=take_in_phases, args=(tid, 3, words, taken)) for tid in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (taken == 1).all()
