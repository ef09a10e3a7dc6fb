"""Records one run of an engine's loader: which slices of which HF tensors are copied into each of the engine's tensors.

The recorder intercepts torch's operations, below any class or wrapper. It identifies memory by its storage, so views
need no special code: for each copy it notes the memory that is read and the memory that is written. Intermediate
tensors (of a clone, a cast, a concatenation) are memory as well: copies into them are composed with copies from them.
If an operation computes its result, only the names of the HF tensors that went into it are recorded. Writes without
torch, or in other threads, are not recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mcore_bridge.weights.engine.traced_storage import Piece, TracedStorage, Write, pieces_of
from mcore_bridge.weights.plan.boxes import BoxCopy
from mcore_bridge.weights.transfer.copier import WORDS

_ATEN = torch.ops.aten


class Recorder(TorchDispatchMode):
    """A context that records every operation of torch that writes memory.

    >>> recorder = Recorder()
    >>> with recorder:
    ...     load(recorder.watched(pairs))
    >>> recorder.traced(model.lm_head.weight)
    """

    def __init__(self) -> None:
        super().__init__()
        self._memories: dict[tuple[int, int], TracedStorage] = {}
        self._is_paused = False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # otherwise torch imports its compiler, which takes seconds

    def watched(self, pairs: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Pass on pairs of an HF name and a contiguous tensor, and record what is copied from them."""
        while True:
            with self._paused():
                name, tensor = next(pairs, (None, None))
            if name is None or tensor is None:
                return
            self._memories[_address(tensor)] = TracedStorage(hf=name, names=frozenset((name,)))
            yield name, tensor

    def names_in(self, tensor: Tensor) -> frozenset[str]:
        """The names of the HF tensors that went into the memory of ``tensor``, in whole or in part."""
        memory = self._memories.get(_address(tensor))
        if memory is None or memory.hf is not None or not tensor.numel():
            return memory.names if memory else frozenset()
        item, own = tensor.element_size(), BoxCopy.place_of(tensor)
        start, end = own.target * item, own.target_end * item
        inside = [w for w in memory.writes if w.box.target * w.item < end and w.box.target_end * w.item > start]
        return frozenset[str]().union(*(w.origin.names if w.origin else w.names for w in inside))

    def traced(self, tensor: Tensor) -> list[Piece]:
        """The pieces that were written into ``tensor``, in order; boxes count from its first element."""
        memory = self._memories.get(_address(tensor))
        start, item = int(tensor.storage_offset()), tensor.element_size()
        end = BoxCopy.place_of(tensor).target_end
        pieces = pieces_of(memory, len(memory.writes), item) if memory and tensor.numel() else ()
        return [
            piece._replace(box=BoxCopy(piece.box.source, piece.box.target - start, piece.box.dims))
            for piece in pieces
            if piece.box.target < end and piece.box.target_end > start
        ]

    @contextmanager
    def _paused(self) -> Iterator[None]:
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operation, and record its writes."""
        result = func(*args, **(kwargs or {}))
        if not (self._is_paused or _only_views(func)):
            with self._paused():
                self._note(func, args, kwargs or {}, result)
        return result

    def _note(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> None:
        note = _NOTES.get(func.overloadpacket)
        if note is not None and func.overloadpacket in _IN_PLACE:
            note(self, args, kwargs, result)
            return
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        known = {_address(tensor) for tensor in inputs}
        fresh = [t for t in tree_leaves(result) if isinstance(t, Tensor) and _address(t) not in known]
        names = frozenset[str]().union(*(self._memory(tensor).names for tensor in inputs))
        if func.overloadpacket in _LIFTED:
            fresh = inputs
        for tensor in fresh:
            self._memories.pop(_address(tensor), None)
        if note is not None:
            note(self, args, kwargs, result)
            return
        for tensor in fresh if func.overloadpacket not in _EMPTY else ():
            self._write(tensor, names=names)
        for argument, value in zip(func._schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                for tensor in (leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)):
                    self._write(tensor, names=names)
        for argument in func._schema.arguments:
            if argument.name in kwargs and argument.alias_info is not None and argument.alias_info.is_write:
                self._write(kwargs[argument.name], names=names)

    def _memory(self, tensor: Tensor) -> TracedStorage:
        address = _address(tensor)
        return TracedStorage() if address == _NOWHERE else self._memories.setdefault(address, TracedStorage())

    def _written(self, tensor: Tensor) -> TracedStorage:
        """The record of a memory before a write. The content of an HF tensor becomes the first write of the record."""
        memory = self._memory(tensor)
        if memory.hf is not None:
            item = tensor.element_size()
            whole = BoxCopy.of(0, (tensor.untyped_storage().nbytes() // item,), (1,), 0, (1,))
            changed = TracedStorage(writes=[Write(whole, item, memory, 0, item)], names=memory.names)
            memory = self._memories[_address(tensor)] = changed
        return memory

    def _write(self, target: Tensor, *, bits: int | None = None, names: frozenset[str] = frozenset()) -> None:
        memory = self._written(target)
        memory.writes.append(Write(BoxCopy.place_of(target), target.element_size(), bits=bits, names=names))
        memory.names |= names

    def _copy(self, target: Tensor, source: Tensor) -> None:
        if not target.numel() or target.is_meta:
            return
        origin, memory = self._memory(source), self._written(target)
        if not (origin.names or origin.writes):  # a constant of the loader, or a number that it read out of a tensor
            same = source.numel() == 1 or bool((source == source.flatten()[0]).all())
            self._write(target, bits=_bits_of(target) if same else None)
            return
        source = source.expand(target.shape)
        box = BoxCopy.of(
            int(source.storage_offset()), target.shape, source.stride(), int(target.storage_offset()), target.stride()
        )
        casts = source.dtype != target.dtype
        memory.writes.append(
            Write(box, target.element_size(), origin, len(origin.writes), source.element_size(), None, casts)
        )
        memory.names |= origin.names


@cache
def _only_views(func: Any) -> bool:
    """Whether an operation writes nothing, and returns views alone."""
    schema = func._schema
    infos = [result.alias_info for result in schema.returns]
    writes = any(argument.alias_info is not None and argument.alias_info.is_write for argument in schema.arguments)
    return bool(infos) and not writes and all(info is not None for info in infos) and func.overloadpacket not in _LIFTED


def _address(tensor: Tensor) -> tuple[int, int]:
    """A key of a memory. Freed memory is often reused, but seldom with an equal size and without a recorded write."""
    storage = tensor.untyped_storage()
    return (storage.data_ptr(), storage.nbytes()) if storage.data_ptr() else _NOWHERE


def _bits_of(tensor: Tensor) -> int:
    """The first element, as an unsigned number."""
    size = tensor.element_size()
    first = tensor.as_strided((1,), (1,), tensor.storage_offset()).view(WORDS[size])
    return int(first.item()) % (1 << 8 * size)


# operations with a special function -------------------------------------------------------------------------

_Note = Callable[[Recorder, Sequence[Any], dict[str, Any], Any], None]


def _note_copy(recorder: Recorder, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> None:
    if isinstance(args[1], Tensor):
        recorder._copy(args[0], args[1])
    else:
        _note_fill(recorder, args, kwargs, result)


def _note_copies(recorder: Recorder, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> None:
    for target, source in zip(args[0], args[1], strict=True):
        recorder._copy(target, source)


def _note_clone(recorder: Recorder, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> None:
    recorder._copy(result, args[0])


def _note_fill(recorder: Recorder, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> None:
    if result.numel() and not result.is_meta:
        names = [recorder._memory(value).names for value in args[1:] if isinstance(value, Tensor)]
        seen = frozenset[str]().union(*names)
        recorder._write(result, bits=None if seen else _bits_of(result), names=seen)


def _note_cat(recorder: Recorder, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> None:
    dim, start = (args[1] if len(args) > 1 else kwargs.get("dim", 0)), 0
    for tensor in args[0]:
        if tensor.numel():
            recorder._copy(result.narrow(dim, start, tensor.shape[dim]), tensor)
            start += tensor.shape[dim]


def _note_stack(recorder: Recorder, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> None:
    dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
    for index, tensor in enumerate(args[0]):
        recorder._copy(result.select(dim, index), tensor)


def _note_pad(recorder: Recorder, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> None:
    inside = result
    for place, (low, high) in enumerate(zip(args[1][::2], args[1][1::2], strict=True)):
        dim = result.dim() - 1 - place
        if low < 0 or high < 0:
            recorder._write(result, names=recorder._memory(args[0]).names)
            return
        inside = inside.narrow(dim, low, result.shape[dim] - low - high)
    value = args[2] if len(args) > 2 else kwargs.get("value", 0)
    if result.numel() and not result.is_meta:
        recorder._write(result, bits=_bits_of(torch.full((1,), value, dtype=result.dtype)))
    recorder._copy(inside, args[0])


_NOTES: dict[Any, _Note] = {
    _ATEN.copy_: _note_copy,
    _ATEN._foreach_copy_: _note_copies,
    _ATEN.clone: _note_clone,
    _ATEN._to_copy: _note_clone,
    _ATEN.fill_: _note_fill,
    _ATEN.zero_: _note_fill,
    **dict.fromkeys((_ATEN.zeros, _ATEN.zeros_like, _ATEN.new_zeros, _ATEN.ones, _ATEN.ones_like), _note_fill),
    **dict.fromkeys((_ATEN.full, _ATEN.full_like, _ATEN.new_full), _note_fill),
    _ATEN.cat: _note_cat,
    _ATEN.stack: _note_stack,
    _ATEN.constant_pad_nd: _note_pad,
}
_IN_PLACE = {_ATEN.copy_, _ATEN._foreach_copy_, _ATEN.fill_, _ATEN.zero_}
"""Operations that return their argument, and no new memory."""
_NOWHERE = (0, 0)
"""The address of tensors without memory, such as tensors on the meta device."""
_LIFTED = {_ATEN.lift, _ATEN.lift_fresh}
"""Operations on a tensor that Python has just made from numbers."""
_EMPTY = {_ATEN.empty, _ATEN.empty_like, _ATEN.empty_strided, _ATEN.new_empty, _ATEN.new_empty_strided}
"""Operations that allocate memory and write nothing into it."""
