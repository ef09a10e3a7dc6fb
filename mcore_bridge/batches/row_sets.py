"""One set of adapters for each row of a batch: what is refused, and the tokens of each set in each microbatch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from mcore_bridge.arguments import list_of
from mcore_bridge.batches.gradients import Holders, holder_of, is_held
from mcore_bridge.batches.packing import PackedSequences
from mcore_bridge.batches.text_collectives import reduce_max
from mcore_bridge.config.mesh.alike import Shared
from mcore_bridge.errors import BatchError, ConfigError
from mcore_bridge.weights.model_chunks import Models, adapters_in_use, chunks_of, is_without_adapters, modules_of
from mcore_bridge.weights.param_sync import is_pending

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel

RowSets = Sequence[str | None]
"""For each row of a batch the name of a set of adapters, or None for the base alone."""
ROW_SETS = list_of(
    "a list with the name of a set or None for each row", str, type(None), advice='pass a list such as ["math", None]'
)
Wrapped = Mapping[str, Models]
"""By the name of a set, the chunks in the wrappers that were made while this set was in use."""
_GRAPHS = ("enable_cuda_graph", "external_cuda_graph", "cuda_graph_impl")
_NUMBER = "mcore_bridge: microbatch of row adapters"
"""A state in megatron-core's tracker of random numbers: the number of the microbatch that a forward runs.

A recompute restores the states of its forward. So it finds the rows of its own microbatch, although the forwards of
later microbatches may have run since.
"""
_IN_TOWER = "mcore_bridge: set of row adapters in a tower"
"""A state as above: the number of the set whose images a tower runs."""
KNOWN = ("allgather", "alltoall")
"""The dispatchers that can send a tensor of one feature: kernels of others need the width and dtype of the model."""
_APART = "call set_adapters and forward for the rows of each set"


def with_wrappers(models: Models | Wrapped) -> tuple[Models, Wrapped]:
    """Chunks that can run a forward, and the wrappers of sets: none unless ``models`` is a mapping."""
    return (next(iter(models.values()), ()), models) if isinstance(models, Mapping) else (models, {})


def adapters_of(
    chunks: Sequence[nn.Module], sets: RowSets | None, wrapped: Wrapped, batch: int, *, learns: bool
) -> Shared:
    """A description of the adapters that a forward uses, for ranks to compare.

    Args:
        chunks: the chunks of this rank, wrapped or not.
        sets: the set of each row; None: all rows use the set in use.
        wrapped: the wrappers of sets.
        batch: the number of rows.
        learns: whether a backward follows.

    Raises:
        BatchError: the rows cannot use these sets. The message names all reasons.
    """
    if sets is None:
        if wrapped:
            raise BatchError("models may be a mapping with adapters= alone, found adapters=None: pass the chunks")
        return {"adapters": adapters_in_use(chunks)}
    problems = [problem for chunk in chunks_of(chunks) for problem in _problems(chunk, sets)]
    problems += [*_problems_of_holders(chunks, wrapped)] if learns else []
    if len(sets) != batch:
        problems.insert(0, f"adapters must have one entry for each of {batch} rows, found {len(sets)}: add the others")
    if problems:
        raise BatchError("; ".join(dict.fromkeys(problems)))
    return {"adapters": f"one of {[*_by_name(chunks_of(chunks)[0])]} for each row", "adapters of rows": [*sets]}


def _problems(chunk: GPTModel, sets: RowSets) -> Iterator[str]:
    """Why the rows of a batch cannot use these sets of a chunk."""
    config, by_name, names = chunk.config, _by_name(chunk), {name for name in sets if name is not None}
    if unknown := sorted(names - by_name.keys()):
        yield f"adapters must name sets of the models, {[*by_name]}, found {unknown}: call add_adapters(name=) first"
    of_sets = {name: by_name[name] for name in sorted(names & by_name.keys())}
    dispatcher = getattr(config, "moe_token_dispatcher_type", None)
    sparse = getattr(config, "experimental_attention_variant", None) == "dsa"
    kinds: dict[str, Callable[[str, Any], bool]] = {
        f"routed experts with moe_token_dispatcher_type={dispatcher!r}": lambda path, layer: (
            dispatcher not in KNOWN and layer.expert
        ),
        "kv_b_proj in sparse attention": lambda path, layer: sparse and path.endswith("linear_kv_up_proj"),
    }
    for what, is_such in kinds.items():
        if having := [name for name, own in of_sets.items() if any(is_such(*pair) for pair in own.modules.items())]:
            yield f"rows cannot have separate adapters of {what}, found them in {having}: {_APART}"
    if graphs := [name for name in _GRAPHS if getattr(config, name, None) not in (None, False, "none")]:
        yield f"CUDA graphs would keep the rows of the first batch, found {graphs}: {_APART}, or build without them"
    if of_sets and is_without_adapters(chunk):
        yield "adapters= was given in a block of without_adapters: leave out one of them"


def _problems_of_holders(chunks: Sequence[nn.Module], wrapped: Wrapped) -> Iterator[str]:
    """Why gradients of sets could not be completed. Other replicas may use any set, so this is about all sets."""
    known = [*_by_name(chunks_of(chunks)[0])]
    if unknown := [name for name in wrapped if name not in known]:
        yield f"models must have wrappers of their sets, {known}, found {unknown}: leave them out"
    if unheld := [name for name in known if any(None in of_chunk for of_chunk in _holders(chunks, wrapped, [name]))]:
        yield (
            f"DDP or FSDP has gradients of {unheld}, and this forward could not complete them. For megatron-core's "
            f"DDP, pass a mapping as models, such as {{{unheld[0]!r}: [ddp]}}. For FSDP, {_APART}"
        )


def _holders(chunks: Sequence[nn.Module], wrapped: Wrapped, names: Sequence[str]) -> list[list[Any]]:
    """For each chunk the instances of DDP that have gradients of these sets; None for gradients that none of them has.

    A set without an entry in ``wrapped`` may be the set in whose wrappers ``chunks`` are.
    """
    holders: list[list[Any]] = []
    for place, chunk in enumerate(chunks_of(chunks)):
        of_chunk: dict[int, Any] = {}
        for name in names:
            own = [parameter for parameter in _by_name(chunk)[name].parameters() if is_held(parameter)]
            of_set = modules_of(wrapped.get(name, chunks))
            ddp = holder_of(of_set[place]) if len(of_set) == len(chunks) else None
            if own:
                has_all = ddp is not None and all(parameter in ddp.param_to_bucket_group for parameter in own)
                of_chunk[id(ddp)] = ddp if has_all else None
        holders.append([*of_chunk.values()])
    return holders


@dataclass(frozen=True)
class SortedTokens:
    """The tokens of a layer that belong to a group, sorted by group.

    Attributes:
        places: the places of these tokens among all tokens of the layer, int64 ``[sorted tokens]``.
        counts: how many tokens each group has.
        ends: how many sorted tokens there are up to the end of each group, int32 ``[groups]``.
        num_tokens: how many tokens the layer has.
    """

    places: Tensor
    counts: list[int]
    ends: Tensor
    num_tokens: int

    @cached_property
    def _places_among_sorted(self) -> Tensor:
        """For each token of the layer its place among sorted tokens; -1 for a token without a group."""
        inverse = torch.full((self.num_tokens,), -1, device=self.places.device)
        inverse[self.places] = torch.arange(len(self.places), device=self.places.device)
        return inverse

    def take(self, tokens: Tensor) -> Tensor:
        """The sorted tokens, ``[sorted tokens, features]``, of all tokens of the layer, ``[tokens, features]``."""
        taken: Tensor = _Rows.apply(tokens, self.places, self._places_among_sorted)
        return taken

    def put(self, own: Tensor) -> Tensor:
        """The inverse of ``take``; zero for tokens without a group."""
        whole: Tensor = _Rows.apply(own, self._places_among_sorted, self.places)
        return whole


class _Rows(torch.autograd.Function):
    """The rows of a matrix at these places; zero for -1.

    No place comes twice. So the gradient is also taken from the places that are the inverse. torch would add row after
    row.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, places: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(places, inverse)
        if len(places) <= len(rows):  # sorted tokens, or all tokens and each has a group
            return rows.index_select(0, places)
        extended = torch.cat([rows, rows.new_zeros(1, rows.size(1))])
        return extended.index_select(0, places.where(places >= 0, len(rows)))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        places, inverse = ctx.saved_tensors
        return _Rows.apply(grad, inverse, places), None, None


def sort_tokens(numbers: Tensor, num_groups: int) -> SortedTokens:
    """Sort tokens by the number of their group, int64 ``[tokens]``; -1 for tokens without a group."""
    counts = torch.bincount(numbers + 1, minlength=num_groups + 1)
    ends = counts[1:].cumsum(0, dtype=torch.int32)
    none, *of_groups = counts.tolist()
    return SortedTokens(numbers.argsort(stable=True)[none:], of_groups, ends, len(numbers))


class TokenSets:
    """The tokens of each set of adapters, for each microbatch of a batch.

    Args:
        sets: for each microbatch the set of each token, by its place in ``names``, in the order of hidden states
            ``[seq, batch]`` of this context-parallel rank; -1 for a token without adapters. int64 ``[seq * batch]``.
        names: the names of the sets.
        of_rows: for each row of the batch its set, by its place in ``names``; -1 for a row without adapters.
        rank, parts: the part of the sequence that this rank has outside of layers, and the number of parts; one part
            without sequence parallelism.
    """

    def __init__(
        self, sets: Sequence[Tensor], names: Sequence[str], of_rows: Sequence[int], *, rank: int, parts: int
    ) -> None:
        self.names, self.of_rows, self._device = names, of_rows, sets[0].device
        self._numbers = [{len(own): own for own in (whole.chunk(parts)[rank], whole)} for whole in sets]
        self._sorted: list[dict[object, SortedTokens]] = [{} for _ in sets]
        self._tables: dict[object, Tensor] = {}
        self._in_tower: dict[object, SortedTokens] = {}

    def begin(self, number: int) -> None:
        """Let the forward that follows use the rows of the microbatch ``number``."""
        _states()[_NUMBER] = torch.tensor(number)

    def end(self) -> None:
        """No forward follows."""
        _states().pop(_NUMBER, None)

    def numbers(self, num_tokens: int) -> Tensor:
        """The number of the set of each token: of all tokens of the microbatch, or of this rank's part of them.

        Args:
            num_tokens: how many tokens there are: all, or under sequence parallelism the part of a rank.
        """
        known = self._numbers[self._microbatch]
        if num_tokens not in known:
            raise ConfigError(
                f"a layer with adapters must get {' or '.join(map(str, known))} tokens, as the microbatch has, found "
                f"{num_tokens}: its tokens have no known rows, so call forward for each set without adapters="
            )
        return known[num_tokens]

    def among(self, numbers: Tensor, sets: tuple[int, ...]) -> Tensor:
        """For each number of a set its place in ``sets``; -1 if it is not there."""
        if (sets, numbers.device) not in self._tables:
            places = [sets.index(own) if own in sets else -1 for own in range(-1, len(self.names))]
            self._tables[sets, numbers.device] = torch.tensor(places, device=numbers.device)
        return self._tables[sets, numbers.device][numbers + 1]

    def sort(self, num_tokens: int, sets: tuple[int, ...]) -> SortedTokens:
        """The tokens sorted by set, once for each microbatch. Tokens of no set in ``sets`` are left out.

        Args:
            num_tokens: as for ``numbers``.
            sets: the numbers of the sets.
        """
        known = self._sorted[self._microbatch]
        if (num_tokens, sets) not in known:
            known[num_tokens, sets] = sort_tokens(self.among(self.numbers(num_tokens), sets), len(sets))
        return known[num_tokens, sets]

    @contextmanager
    def in_tower(self, number: int) -> Iterator[None]:
        """In the block, a tower runs the images of one set alone, by its number; -1: of rows without adapters."""
        _states()[_IN_TOWER] = torch.tensor(number)
        try:
            yield
        finally:
            del _states()[_IN_TOWER]

    def sort_in_tower(self, num_tokens: int, sets: tuple[int, ...]) -> SortedTokens:
        """``sort`` for a layer of a tower, whose tokens all belong to one set."""
        number = int(_states()[_IN_TOWER])
        if (num_tokens, sets, number) not in self._in_tower:
            place = sets.index(number) if number in sets else -1
            numbers = torch.full((num_tokens,), place, device=self._device)
            self._in_tower[num_tokens, sets, number] = sort_tokens(numbers, len(sets))
        return self._in_tower[num_tokens, sets, number]

    @property
    def _microbatch(self) -> int:
        return int(_states()[_NUMBER])


@contextmanager
def using_row_sets(
    chunks: Sequence[nn.Module],
    sets: RowSets | None,
    wrapped: Wrapped,
    batches: Sequence[PackedSequences],
    rows: Sequence[slice],
    *,
    learns: bool,
) -> Iterator[tuple[Callable[[int], None], Holders]]:
    """In the block, let each row use its set, and only for this let the model have these sets.

    With a backward, all replicas communicate: each must have the parameters of the sets that any of them uses. The same
    holds for replicas that share experts with adapters, and for a forward that gathers parameters after a step.

    Args:
        chunks: the chunks of this rank, wrapped or not.
        sets: the set of each row; None: nothing changes.
        wrapped: the wrappers of sets.
        batches: the microbatches.
        rows: the rows of each microbatch; further microbatches are padding.
        learns: whether a backward follows.

    Yields:
        A function to call with the number of a microbatch before each forward of it, and for each chunk the instances
        of megatron-core's DDP that have gradients of these sets.
    """
    if sets is None:
        yield lambda number: None, ()
        return
    bare = chunks_of(chunks)
    groups, known = bare[0].pg_collection, [*_by_name(bare[0])]
    device = batches[0].places.device
    is_used = torch.tensor([name in sets for name in known], dtype=torch.int64, device=device)
    if learns or is_pending(chunks):
        reduce_max(is_used, groups.dp_cp)
    elif any(layer.expert for chunk in bare for own in _by_name(chunk).values() for layer in own.modules.values()):
        reduce_max(is_used, groups.tp_ep)
    names = [name for name, used in zip(known, is_used.tolist(), strict=True) if used]
    if learns and not names:
        raise BatchError("adapters must name a set for a row, since a loss is given, found None for all: leave it out")
    numbers = [-1 if name is None else names.index(name) for name in sets]
    of_batches = [numbers[own] for own in rows] + [[]] * (len(batches) - len(rows))
    of_tokens = [_sets_of_tokens(*pair, groups.cp.rank()) for pair in zip(batches, of_batches, strict=True)]
    cut: Any = groups.tp if bare[0].config.sequence_parallel else None
    tokens = TokenSets(of_tokens, names, numbers, rank=cut.rank() if cut else 0, parts=cut.size() if cut else 1)
    with ExitStack() as stack:
        for chunk in bare:
            stack.enter_context(chunk.bridge_adapter_sets.used_by_row(chunk, tokens))
        stack.callback(tokens.end)
        yield tokens.begin, _holders(chunks, wrapped, names) if learns else ()


def _by_name(chunk: Any) -> dict[str, Any]:
    """The sets of adapters of a chunk by name. Chunks have an object with them once they have adapters."""
    by_name: dict[str, Any] = chunk.bridge_adapter_sets.by_name if hasattr(chunk, "bridge_adapter_sets") else {}
    return by_name


def _states() -> dict[str, Any]:
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    states: dict[str, Any] = get_cuda_rng_tracker().states_
    return states


def _sets_of_tokens(batch: PackedSequences, numbers: Sequence[int], cp_rank: int) -> Tensor:
    """The number of the set of each token in the order of hidden states, ``[tokens * rows]``; -1 at padding."""
    places = batch.places[cp_rank]
    padded = torch.tensor([*numbers, *[-1] * (batch.shape[0] - len(numbers))], device=places.device)
    own = padded[places.clamp(min=0) // batch.shape[1]]
    return own.where(places >= 0, -1).T.flatten()
