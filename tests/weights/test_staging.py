"""Slots and threads: memory is bounded, results come in order, and no error or thread is lost."""

import threading
import time

import pytest
import torch

from mcore_bridge.weights.files.staging import NUM_SLOTS, NUM_THREADS, Staging

CPU = torch.device("cpu")


def test_no_more_is_under_way_than_there_are_slots():
    gate, begun, submitted = threading.Event(), [], []

    def work():
        begun.append(threading.current_thread().name)
        gate.wait(60)

    def submit_all():
        with Staging() as staging:
            for _ in range(NUM_SLOTS + 3):
                slot = staging.take()
                submitted.append(slot)
                staging.submit(slot, work)

    caller = threading.Thread(target=submit_all)
    caller.start()
    while len(submitted) < NUM_SLOTS or len(begun) < NUM_THREADS:
        time.sleep(0.01)
    time.sleep(0.2)  # more would come now
    assert len(submitted) == NUM_SLOTS
    assert len(begun) == NUM_THREADS
    gate.set()
    caller.join()
    assert len(submitted) == len(begun) == NUM_SLOTS + 3
    assert len(set(map(id, submitted))) == NUM_SLOTS


def test_the_caller_finishes_in_the_order_in_which_it_began():
    finished = []
    with Staging() as staging:
        for number in range(50):
            delay = 0.002 * (number % 3)
            staging.submit(staging.take(), lambda delay=delay: time.sleep(delay), lambda n=number: finished.append(n))
    assert finished == list(range(50))


@pytest.mark.parametrize("late", [True, False])
def test_what_a_thread_raises_is_raised_and_no_thread_is_left(late):
    """An error comes while there is more work, or after the caller has submitted all of it."""

    def fail():
        raise OSError("no space left on device")

    after = []
    with pytest.raises(OSError, match="no space left"), Staging() as staging:  # noqa: PT012
        staging.submit(staging.take(), fail)
        for _ in range(0 if late else 2 * NUM_SLOTS):
            staging.submit(staging.take(), lambda: time.sleep(0.001))
            after.append(1)
    assert len(after) == (0 if late else NUM_SLOTS - 1)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("staging")]


def test_what_the_caller_raises_stops_the_threads():
    with pytest.raises(KeyboardInterrupt), Staging() as staging:  # noqa: PT012
        staging.submit(staging.take(), lambda: time.sleep(0.1))
        raise KeyboardInterrupt
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("staging")]


def test_a_slot_is_taken_from_memory_once():
    places = set()
    with Staging(100) as staging:
        for _ in range(3 * NUM_SLOTS):
            slot = staging.take()
            memory = slot.memory(60, CPU)
            assert memory.nbytes == 60
            places.add(memory.data_ptr())
            staging.submit(slot, lambda: None)
    assert len(places) == NUM_SLOTS
