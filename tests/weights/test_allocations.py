"""The allocations in which the tensors of a trainer lie, from which an engine pulls."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from mcore_bridge.weights.transfer.copier import Buffers

SIZES = st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=5), min_size=1, max_size=4)
"""Numbers of elements of the tensors, one list for each allocation."""


@given(SIZES, st.randoms(use_true_random=False))
def test_each_tensor_begins_at_its_byte_of_its_allocation(sizes, random):
    wholes = [torch.arange(1 + sum(of_one)) for of_one in sizes]
    tensors = [part for whole, of_one in zip(wholes, sizes, strict=True) for part in whole[1:].split(of_one)]
    random.shuffle(tensors)
    allocations = Buffers(tensors).allocations
    assert len({whole.data_ptr() for whole in allocations.wholes}) == len(allocations.wholes)
    for tensor, number, offset in zip(tensors, allocations.layout.numbers, allocations.layout.offsets, strict=True):
        if tensor.numel():
            whole = allocations.wholes[number]
            assert whole.data_ptr() == tensor.untyped_storage().data_ptr()
            assert torch.equal(whole[offset : offset + tensor.nbytes].view(tensor.dtype), tensor)
