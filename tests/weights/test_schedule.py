"""Messages of two sizes: large ones, and small ones beside a tensor that takes most of the memory."""

import contextlib
import math
import time
import weakref
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

import mcore_bridge as mb
from mcore_bridge import ParallelDims
from mcore_bridge.errors import ExportError
from mcore_bridge.weights.agreement import agree_on_plan
from mcore_bridge.weights.plan import export_plan
from mcore_bridge.weights.plan.export_plan import SLAB
from mcore_bridge.weights.plan.payload import OutputTensor
from mcore_bridge.weights.transfer.windows import Memory
from tests.support import pool
from tests.support.exports import assert_exact, built
from tests.support.strategies import tiny

MEMORY = 2_000_000
SMALLER = {  # all limits divided by a thousand, for models of some MB
    "mcore_bridge.weights.plan.gather.MEMORY": MEMORY,
    "mcore_bridge.weights.plan.gather.OTHERWISE": 192 << 10,
    "mcore_bridge.weights.plan.gather.MESSAGE_BYTES": tuple(size << 10 for size in (512, 384, 320, 256, 192, 128)),
    "mcore_bridge.weights.plan.export_plan.SLAB": 32 << 10,
}
SIZES = {"hidden_size": 128, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 16}
HF = {
    "dense": tiny("qwen3", **SIZES, vocab_size=2400, intermediate_size=128, num_hidden_layers=40),
    "large vocabulary": tiny("qwen3", **SIZES, vocab_size=6000, intermediate_size=128, num_hidden_layers=60),
    "experts": tiny(
        "qwen3_moe",
        **SIZES,
        vocab_size=1600,
        num_hidden_layers=6,
        num_experts=64,
        moe_intermediate_size=16,
        mlp_only_layers=[],
    ),
}
CASES = [
    ("dense", ParallelDims(tp=4, sp=True)),
    ("dense", ParallelDims(tp=2, pp=2, sp=True)),
    ("dense", ParallelDims(tp=2, pp=2, vp=2, sp=True)),
    ("dense", ParallelDims(pp=4)),
    ("large vocabulary", ParallelDims(tp=2, pp=2, sp=True)),
    ("experts", ParallelDims(ep=4)),
]


class Counted(Memory):
    """Memory for messages that counts its largest use. Memory is in use as long as a view of it exists."""

    now = most = 0
    limit = math.inf

    def __init__(self, *arguments):
        super().__init__(*arguments)
        end = time.monotonic() + 10
        while self.now + self.all.numel() > self.limit and time.monotonic() < end:
            time.sleep(0.001)  # threads of gloo hold received windows a little longer
        array = np.empty(self.all.numel(), np.uint8)
        weakref.finalize(array, self.count, -array.nbytes)
        self.count(array.nbytes)
        self.all = torch.from_numpy(array)

    @classmethod
    def count(cls, num_bytes):
        cls.now += num_bytes
        cls.most = max(cls.most, cls.now)


@contextlib.contextmanager
def scaled_down(memory=Counted):
    with contextlib.ExitStack() as stack:
        for name, value in {**SMALLER, "mcore_bridge.weights.transfer.executor.Memory": memory}.items():
            stack.enter_context(mock.patch(name, value))
        yield


def export_in_two_sizes(model, dims):
    models, state = built(dims, HF[model])
    Counted.now = Counted.most = 0
    with scaled_down():
        plan = agree_on_plan(models, None, "lm").program.plan
        rooms = [message.room for message in plan.messages]
        expected = Counted.limit = max(export_plan._message_bytes(rooms, number) for number in range(len(rooms)))
        assert_exact(mb.to_hf_state_dict(models), state)
        most, Counted.limit = Counted.most, math.inf
        assert_exact({name: tensor.clone() for name, tensor in mb.iter_hf_weights(models, copy=False)}, state)
        with contextlib.closing(mb.iter_hf_weights(models)) as pairs:
            for number, _ in enumerate(pairs):
                if number == 5 * (1 + dist.get_rank()):
                    break
        assert_exact(mb.to_hf_state_dict(models), state)
        counted = export_plan.peak_bytes(plan)
    largest = max(output.num_bytes for output in plan.payload.outputs)
    return rooms, counted, largest, most, expected


@pytest.mark.parametrize(("model", "dims"), CASES, ids=str)
def test_most_messages_are_large(model, dims):
    """Equal tensors arrive, also as views, and on ranks that stop at different times; memory is as computed."""
    for rooms, counted, largest, most, expected in pool.run(4, export_in_two_sizes, model, dims):
        small, large = sorted(set(rooms))
        assert 1.3 * small < large
        assert rooms.count(large) > len(rooms) / 4
        assert rooms[0] == rooms[-1] == small  # together with the embedding and the output layer
        assert counted <= 1.001 * max(MEMORY, largest * 3 // 2)
        assert most <= expected


def export_without_memory_on_1(after):
    models, state = built(ParallelDims(tp=4, sp=True), HF["dense"])
    calls = iter(range(1 << 30))

    def failing(*arguments):
        if next(calls) == after and dist.get_rank() == 1:
            raise RuntimeError("out of memory")
        return Counted(*arguments)

    with scaled_down(failing), pytest.raises(ExportError) as refused:
        mb.to_hf_state_dict(models)
    with scaled_down():
        assert_exact(mb.to_hf_state_dict(models), state)
    return str(refused.value)


@pytest.mark.parametrize("after", [2, 3, 4, 5])  # after the first two: larger ones, then small ones again
def test_a_rank_without_memory_for_other_messages_leaves_nobody_waiting(after):
    messages = pool.run(4, export_without_memory_on_1, after, timeout=60)
    assert messages == ["rank 1 of the group: RuntimeError: out of memory"] * 4


def test_memory_for_further_messages_is_that_of_their_size():
    """Two small messages have memory when the size changes. Messages in flight after them get new memory."""
    rooms = [1, 1, 4, 4]
    assert export_plan._message_bytes(rooms, 0) == 1 + export_plan.MESSAGES_IN_FLIGHT * 4
    assert export_plan._message_bytes(rooms, 2) == 4 + 4


def test_a_consumer_holds_a_large_tensor_or_two_allocations_of_small_ones():
    """Small tensors of a message share allocations, so a tensor that is kept also keeps its neighbours."""
    small, large = (OutputTensor("a", (num_bytes,), torch.uint8) for num_bytes in (SLAB // 2, SLAB // 2 + 1))
    assert export_plan._kept_by_consumer([small] * 3) == 3 * small.num_bytes
    assert export_plan._kept_by_consumer([large, *[small] * 5]) == 2 * SLAB
    assert export_plan._kept_by_consumer([small, large]) == large.num_bytes
