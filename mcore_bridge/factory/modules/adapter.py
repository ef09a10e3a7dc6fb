"""A low-rank adapter beside a linear layer of megatron-core.

The output of the adapter is cut over ranks like the output of the layer. So no code after the layer has to change. The
layer keeps its class, its weight and its names.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from megatron.core.tensor_parallel import mappings
from megatron.core.tensor_parallel.random import (
    get_cuda_rng_tracker,
    get_data_parallel_rng_tracker_name,
    get_expert_parallel_rng_tracker_name,
)
from torch import Tensor, nn

_ALIGNED = 8
"""All sizes in a grouped product of bf16 must be multiples of this."""
_MOST_GROUPS = 1023
"""The groups that torch's kernel takes at once; it refuses 1,024."""
Product = Callable[[Tensor, Tensor], Tensor]
_OF_WHOLE_EXPERTS = "mcore_bridge: dropout of whole inputs of experts"
Kind = Literal["cut", "summed", "whole", "equal"]
"""How the output of a layer is distributed over tensor-parallel ranks.

"cut": each rank has some of its features (column parallel). "summed": it is summed over ranks (row parallel). "whole":
each rank has all features (down projections of latents), under sequence parallelism of some tokens. "equal": each rank
computes all of it from all tokens (towers).
"""


def outputs_and_input(outputs: Any, hidden: Tensor) -> tuple[tuple[Tensor, Tensor | None], Tensor]:
    """The output of a layer, and the input of its weight: ``hidden``, or ``hidden`` after the layer's norm.

    With ``return_layernorm_output``, TransformerEngine returns this input last, in a tuple to which megatron-core adds
    the bias.
    """
    product, bias, *normed = outputs if isinstance(outputs[0], Tensor) else (outputs[0][0], outputs[1], outputs[0][1])
    return (product, bias), normed[0] if normed else hidden


class Factor(nn.Module):
    """One of the two matrices: a module, so that its parameter is named ``weight``.

    If the caller passed a dtype, the weight keeps it, although megatron-core's ``Float16Module`` casts all parameters.
    """

    def __init__(self, shape: tuple[int, ...], like: Tensor, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.keeps_dtype = dtype is not None
        self.weight = nn.Parameter(torch.zeros(shape, dtype=dtype or like.dtype, device=like.device))

    def forward(self) -> Tensor:
        """Return the matrix. As a module call, this makes DDP with an overlapped gather wait for the parameter."""
        return self.weight

    def _apply(self, change: Callable[[Tensor], Tensor], recurse: bool = True) -> Factor:
        before = self.weight.data
        super()._apply(change, recurse)
        if self.keeps_dtype and self.weight.dtype != before.dtype:
            self.weight.data = before.to(self.weight.device)
        return self


class Dropout(nn.Module):
    """Zeroes elements of an adapter's input in training mode, with a random state of megatron-core.

    Ranks with equal inputs must draw equal numbers, and ranks with parts of one input must not. A recompute restores
    all these states, and so draws the numbers of the forward again.

    Args:
        p: the probability of a zero. Other elements are multiplied by ``1 / (1 - p)``.
        is_cut: whether ranks of tensor parallelism, or of ``etp`` for an expert, have parts of one input.
        expert: whether the input has tokens of a routed expert, so that ranks with other experts have other tokens.
        expert_rank: the rank among the ranks with other experts.
    """

    def __init__(self, p: float, *, is_cut: bool, expert: bool, expert_rank: int) -> None:
        super().__init__()
        self.p, self.is_cut, self.expert, self.expert_rank = p, is_cut, expert, expert_rank

    def forward(self, hidden: Tensor) -> Tensor:
        """The input of A, of any shape."""
        tracker = get_cuda_rng_tracker()
        if self.expert and not self.is_cut:
            self._seed(hidden.device)
            own = tracker.fork(_OF_WHOLE_EXPERTS)
        elif self.is_cut:
            own = tracker.fork(*[get_expert_parallel_rng_tracker_name()] * self.expert)
        else:
            own = nullcontext()  # ranks of tensor parallelism have equal default generators
        with own:
            return nn.functional.dropout(hidden, self.p)

    def _seed(self, device: torch.device) -> None:
        """Make the random state that ranks of ``etp`` have in common, which megatron-core lacks."""
        tracker = get_cuda_rng_tracker()
        if _OF_WHOLE_EXPERTS not in tracker.states_:
            with tracker.fork(get_data_parallel_rng_tracker_name()):  # equal on all ranks of tensor parallelism
                seed = int(torch.randint(1 << 31, (), device=device)) + self.expert_rank
            tracker.seeds_.discard(seed)  # a recompute may take the state away
            tracker.add(_OF_WHOLE_EXPERTS, seed)


class Adapter(nn.Module):
    """Adds ``scale * B A x`` to the output of a layer.

    With DoRA, each row of the changed weight then gets the length of its magnitude. Like ``peft``, gradients regard the
    length of the row before as a constant.

    Args:
        kind: the parallel state of the layer's output.
        linear_in, linear_out: this rank's A, ``[parts * rank, in]``, and its B, ``[out, rank]``.
        part_of_row: for each row of B, the part (HF projection) whose rows of A it reads. int64 ``[out]``. It is -1 for
            rows without an adapter: B is zero there, and gets no gradient.
        scale: alpha / rank.
        group: the ranks that cut the layer; for an expert, the ranks of expert tensor parallelism.
        sequence_parallel: whether hidden states outside of the layer are cut along the sequence.
        expert: whether the layer belongs to a routed expert, for which the dispatcher of tokens communicates.
        allreduce: whether gradients are summed over all data-parallel ranks, or only over the data-parallel ranks of
            experts.
        magnitude: this rank's magnitudes for DoRA, ``[out]``; None without DoRA.
        dropout: the dropout of the input of A; None without dropout. Each part draws for itself, as in ``peft``.
    """

    chosen: Tensor
    switch = ""
    """The name of the random state by which ``without_adapters`` switches this adapter off, also in recomputes."""

    def __init__(
        self,
        kind: Kind,
        linear_in: Factor,
        linear_out: Factor,
        part_of_row: Tensor,
        *,
        scale: float,
        group: Any,
        sequence_parallel: bool,
        expert: bool,
        allreduce: bool,
        magnitude: Factor | None = None,
        dropout: Dropout | None = None,
    ) -> None:
        super().__init__()
        self.linear_in, self.linear_out, self.magnitude, self.dropout = linear_in, linear_out, magnitude, dropout
        self.kind, self.scale, self.group = kind, scale, group
        self.parts = parts = linear_in.weight.shape[-2] // linear_out.weight.shape[-1]
        self.sequence_parallel, self.expert = sequence_parallel and not expert, expert
        self.has_cut_rows = kind == "summed" and group.size() > 1
        self.masked = parts > 1 or bool((part_of_row < 0).any())
        chosen = nn.functional.one_hot(part_of_row + 1, parts + 1)[:, 1:].to(linear_out.weight)
        self.register_buffer("chosen", chosen[:, :, None], persistent=False)
        self.whole = {"cut": [True, False], "summed": [False, True], "whole": [True, True], "equal": [True, True]}[kind]
        for (_, factor, dim), whole in zip(self.tensors, (*self.whole, self.whole[1]), strict=False):
            factor.allreduce = allreduce
            self._mark(factor, dim=-1 if whole else dim)

    @property
    def tensors(self) -> list[tuple[str, Any, int]]:
        """The name of each module with a parameter, the parameter, and its dim that the weight has, too."""
        dims = {"linear_in": 1, "linear_out": 0, "magnitude": 0}
        modules = ((end, getattr(self, end), dim) for end, dim in dims.items())
        return [(end, module.weight, dim) for end, module, dim in modules if module is not None]

    def _mark(self, weight: Any, *, dim: int) -> None:
        """Set the attributes for megatron-core's DDP and optimizer. The factor is cut along ``dim``; -1: whole.

        The norm of gradients must count each number once. A whole factor is counted on the first rank of ``tp``. But
        with an ``etp`` other than ``tp``, ranks of ``tp`` have different experts, which megatron-core 0.16.1 ignores.
        So all experts are marked as cut, and whole factors as shared from the second rank of ``etp`` on.
        """
        whole = dim < 0
        weight.average_gradients_across_tp_domain = self.kind == "equal"  # kernels may add in another order
        weight.sequence_parallel = self.sequence_parallel and whole  # finalize_model_grads sums these over tp
        weight.tensor_model_parallel, weight.shared = self.expert or not whole, False
        if self.expert and whole:
            weight.shared = self.group.rank() > 0
        weight.partition_dim, weight.partition_stride = dim if whole else dim + self.expert, 1

    def forward(self, layer: Any, inputs: tuple[Tensor, ...], outputs: Any) -> Any:
        """The outputs of ``layer`` (product, and bias or None), with the adapter's output added to the product."""
        (product, bias), hidden = outputs_and_input(outputs, inputs[0])
        if self.is_off():
            return product, bias
        dropped = self.inputs_of(hidden)
        beside = self.beside(dropped).to(product.dtype)
        if self.magnitude is not None:
            redone = self.of_parts(self.products(layer.weight, dropped)) if self.drops() else None
            base = without_bias(layer, product, bias) if redone is None else redone
            beside = self.resized(layer.weight, base, beside)
        return product + beside, bias

    def resized(self, weight: Tensor, base: Tensor, beside: Tensor) -> Tensor:
        """What DoRA adds to the product of the layer, from its product ``base`` without a bias, and from ``beside``."""
        factor = self.factor_of_rows(weight)
        return (factor - 1).to(base.dtype) * base + factor.to(base.dtype) * beside

    def is_off(self) -> bool:
        """Whether this forward runs the base alone, or is the recompute of such a forward."""
        return self.switch in get_cuda_rng_tracker().states_

    def beside(self, inputs: list[Tensor]) -> Tensor:
        """The output of the adapter, cut like the layer's output, from inputs ``[..., in]`` of A."""
        return self.product_of(inputs, *self.factors(), nn.functional.linear)

    def product_of(self, inputs: list[Tensor], first: Tensor, second: Tensor, product: Product) -> Tensor:
        """``beside``, from the factors that ``factors`` returns."""
        return product(self.across(inner(inputs, first, product)), second) * self.scale

    def across(self, inner: Tensor) -> Tensor:
        """``inner`` for the tokens of the layer's output, from all ranks that cut the layer. Tokens come first."""
        if self.is_local:
            return inner
        return self._gathered(inner) if self.kind == "cut" else self._reduced(inner)

    @property
    def is_local(self) -> bool:
        """Whether A and B see the same tokens on a rank, so that nothing is communicated between them."""
        return self.expert or self.kind in ("whole", "equal") or self.group.size() == 1

    def drops(self) -> bool:
        """Whether this forward zeroes elements of the inputs of A."""
        return self.dropout is not None and self.training

    def inputs_of(self, hidden: Tensor) -> list[Tensor]:
        """The inputs of A from the input of the layer: one for all parts, or with dropout one for each part."""
        if self.dropout is None or not self.training:
            return [hidden]
        return [self.dropout(hidden) for _ in range(self.parts)]

    def products(self, weight: Tensor, inputs: list[Tensor]) -> list[Tensor]:
        """The output of the layer without its bias, for each of these inputs. Ranks that cut the layer join."""
        linear = nn.functional.linear
        if self.kind == "cut":
            return [linear(self._gathered(own), weight) for own in inputs]
        outs = [linear(own, weight) for own in inputs]
        return [self._reduced(out) for out in outs] if self.kind == "summed" else outs

    def of_parts(self, outs: list[Tensor]) -> Tensor:
        """One output, where each row comes from the output for the input of its part."""
        if len(outs) == 1:
            return outs[0]
        return sum((out * own for out, own in zip(outs, self.chosen[..., 0].unbind(1), strict=True)), torch.zeros(()))

    def added_to(self, weight: Tensor) -> Tensor:
        """The layer's weight with the product of the factors, for attention that does not run the layer.

        A rank's gradient of A covers only its own rows, as in the layer under sequence parallelism.
        """
        if self.is_off():
            return weight
        delta = self._rows(self.linear_out()) @ self.linear_in() * self.scale
        changed = weight + delta.to(weight.dtype)
        return changed if self.magnitude is None else changed * self.factor_of_rows(weight).to(weight.dtype)[:, None]

    def factor_of_rows(self, weight: Tensor) -> Tensor:
        """The factor of DoRA for each row of this rank's output: its magnitude over its length; 1 without an adapter.

        Args:
            weight: the weight of the layer, ``[out, in]``.
        """
        assert self.magnitude is not None
        own = self.has_row()
        lengths = self.lengths_of_rows(weight)
        return torch.where(own, self.magnitude().to(lengths.dtype) / lengths.masked_fill(~own, 1), 1)

    @torch.no_grad()
    def lengths_of_rows(self, weight: Tensor) -> Tensor:
        """The length of each row of the weight with the product of the factors, over all ranks that cut the row.

        It is ``|w|^2 + 2 w.d + |d|^2`` for a row ``d`` of the product, so that no product of the weight's size is made.
        """
        wide = torch.promote_types(weight.dtype, torch.float32)
        first, rows = self.linear_in(), (self._rows(self.linear_out()) * self.scale).to(wide)
        mixed = (weight @ first.to(weight.dtype).mT).to(wide)
        inner = first.to(wide) @ first.to(wide).mT
        squares = torch.linalg.vector_norm(weight, dim=1, dtype=wide).square()
        squares += ((2 * mixed + rows @ inner) * rows).sum(1)
        if self.kind == "summed":
            squares = mappings.reduce_from_tensor_model_parallel_region(squares, group=self.group)
        return squares.clamp(min=0).sqrt()

    def has_row(self) -> Tensor:
        """Whether each row of this rank's output has an adapter. bool ``[out]``."""
        return self.chosen.flatten(1).any(1)

    def _rows(self, second: Tensor) -> Tensor:
        """B with a column for each row of A; each row of B has values only in the columns of its part."""
        return (self.chosen * second[..., None, :]).flatten(-2) if self.masked else second

    def factors(self) -> tuple[Tensor, Tensor]:
        """A and B for products, ``[..., parts * rank, in]`` and ``[..., out, parts * rank]``."""
        return self.linear_in(), self._rows(self.linear_out())

    def stacks(self, expert: int | None = None) -> tuple[Tensor, Tensor]:
        """``factors``, with the experts of a layer as first dim: ``[1, ...]`` for a layer without experts."""
        first, second = self.factors()
        return first[None], second[None]

    def _summed_in_backward(self, tensor: Tensor) -> Tensor:
        copied = mappings.copy_to_tensor_model_parallel_region(tensor, group=self.group)
        if copied.requires_grad:
            copied.register_hook(Tensor.contiguous)  # for other gradients mcore returns the unreduced original
        return copied

    def _gathered(self, inner: Tensor) -> Tensor:
        if self.sequence_parallel:
            return mappings.gather_from_sequence_parallel_region(inner, group=self.group)
        return self._summed_in_backward(inner)

    def _reduced(self, inner: Tensor) -> Tensor:
        if self.sequence_parallel:
            return mappings.reduce_scatter_to_sequence_parallel_region(inner, group=self.group)
        return mappings.reduce_from_tensor_model_parallel_region(inner, group=self.group)


def without_bias(layer: nn.Module, product: Tensor, returned: Tensor | None) -> Tensor:
    """The product of a layer that adds its bias itself, or that returns it. TransformerEngine has an empty for none."""
    bias = getattr(layer, "bias", None)
    return product if returned is not None or bias is None or not bias.numel() else product - bias


def inner(inputs: list[Tensor], first: Tensor, product: Product) -> Tensor:
    """``A x`` for all parts, ``[..., parts * rank]``: of this rank's tokens, or of this rank's part of features."""
    pairs = zip(inputs, first.chunk(len(inputs), -2), strict=True)
    products = [product(own.to(factor.dtype), factor) for own, factor in pairs]
    return products[0] if len(products) == 1 else torch.cat(products, -1)


def beside(check: Callable[[], None], layer: nn.Module, inputs: tuple[Any, ...], outputs: Any) -> Any:
    """The outputs of ``layer``, with the output of its adapter added if it has one: a forward hook of the layer.

    Args:
        check: raises if the forward needs another set of adapters.
    """
    check()
    adapter = getattr(layer, "adapter", None)
    if adapter is not None:
        return adapter(layer, inputs, outputs)
    return outputs_and_input(outputs, inputs[0])[0]


def beside_plain(check: Callable[[], None], layer: nn.Module, inputs: tuple[Any, ...], outputs: Tensor) -> Any:
    """``beside`` for a layer of torch, which adds its bias itself and returns one tensor."""
    return beside(check, layer, inputs, (outputs, None))[0]


class ExpertAdapters(Adapter):
    """The adapters of a linear layer of all experts of a rank. One parameter holds each factor, ``[experts, ...]``.

    TransformerEngine has one layer for all experts: one grouped product computes each factor of all experts, where
    torch has a kernel for it. In megatron-core's own experts, each has a layer: see ``ExpertLayers``.
    """

    _each: Sequence[tuple[Tensor, Tensor]] = ()

    def forward(self, layer: Any, inputs: tuple[Any, ...], outputs: Any, expert: int | None = None) -> Any:
        """The outputs of ``layer`` with the adapters' added.

        Args:
            layer, inputs, outputs: the layer of one expert; or of all, which gets the tokens and how many each has.
            expert: the place of the expert; None: all.
        """
        (product, bias), hidden = outputs_and_input(outputs, inputs[0])
        if self.is_off():
            return product, bias
        factors = self.factors() if expert is None else self.factors_of(expert)
        of_group = TokenGroups([int(count) for count in inputs[1]]).product if expert is None else nn.functional.linear
        return product + self.product_of(self.inputs_of(hidden), *factors, of_group).to(product.dtype), bias

    def factors(self) -> tuple[Tensor, Tensor]:
        """A and B of all experts. For a whole factor of cut experts, ranks sum its partial gradients here alone."""
        first, second = self.linear_in(), self.linear_out()
        if self.group.size() > 1:
            first, second = (
                self._summed_in_backward(factor) if whole else factor
                for factor, whole in zip((first, second), self.whole, strict=True)
            )
        return first, self._rows(second)

    def stacks(self, expert: int | None = None) -> tuple[Tensor, Tensor]:
        """``factors`` of all experts, or ``[1, ...]`` for the expert at this place."""
        if expert is None:
            return self.factors()
        first, second = self.factors_of(expert)
        return first[None], second[None]

    def factors_of(self, expert: int) -> tuple[Tensor, Tensor]:
        """A and B of the expert at this place."""
        if self._each:
            return self._each[expert]
        first, second = self.factors()
        return first[expert], second[expert]

    def begin(self) -> None:
        """Take the factors apart, once for the layers of all experts: a gradient of each has the size of one expert."""
        first, second = self.factors()
        self._each = [*zip(first.unbind(), second.unbind(), strict=True)]

    def end(self) -> None:
        """Free what ``begin`` holds."""
        self._each = ()


class ExpertLayers(nn.Module):
    """Holds the adapters, as ``adapter``, of a linear layer that each of megatron-core's experts has as a module.

    It is a module of the experts, with the name that TransformerEngine's layer for all experts has there.

    Args:
        experts: megatron-core's ``SequentialMLP``.
        name: the name of the layer in each expert.
        check: as for ``beside``.
    """

    adapter: Any

    def __init__(self, experts: Any, name: str, check: Callable[[], None]) -> None:
        super().__init__()
        for place, expert in enumerate(experts.local_experts):
            layer = expert.get_submodule(name)
            layer.register_forward_hook(partial(self.beside, check, place), prepend=True)
        experts.register_forward_pre_hook(self._begin)
        experts.register_forward_hook(self._end, always_call=True)

    def beside(
        self, check: Callable[[], None], place: int, layer: nn.Module, inputs: tuple[Any, ...], outputs: Any
    ) -> Any:
        """``beside`` for the layer of the expert at this place: a forward hook of it."""
        check()
        if hasattr(self, "adapter"):
            return self.adapter(layer, inputs, outputs, place)
        return outputs_and_input(outputs, inputs[0])[0]

    def _begin(self, experts: nn.Module, inputs: object) -> None:
        if hasattr(self, "adapter"):
            self.adapter.begin()

    def _end(self, experts: nn.Module, inputs: object, outputs: object) -> None:
        if hasattr(self, "adapter"):
            self.adapter.end()


@dataclass(frozen=True)
class TokenGroups:
    """Consecutive tokens in groups, each with a weight of its own: of experts, or of sets of adapters, or of both.

    Attributes:
        counts: how many tokens each group has.
        ends: how many tokens there are up to the end of each group, int32 ``[groups]`` on their device, if it is known.
    """

    counts: list[int]
    ends: Tensor | None = None

    def product(self, hidden: Tensor, weights: Tensor) -> Tensor:
        """Each token of ``[tokens, in]`` times the weight of its group, of ``[groups, out, in]``."""
        return product_of_groups(hidden, [weights], self)[:, : weights.size(1)]


def product_of_groups(hidden: Tensor, stacks: Sequence[Tensor], groups: TokenGroups) -> Tensor:
    """Each token times the weight of its group: one product if torch has a kernel for it, or else one for each group.

    Args:
        hidden: ``[tokens, in]``, sorted by group.
        stacks: the weights of all groups, in order. Each stack is ``[groups, out, in]``. Stacks may differ in ``out``,
            and in ``in``; a narrow weight reads the first features.

    Returns:
        ``[tokens, widest out]``, or some columns more. Columns beyond the ``out`` of a group are zero.
    """
    out, width = max(stack.size(1) for stack in stacks), hidden.size(1)
    is_alike = all(stack.dtype == hidden.dtype for stack in stacks)
    if len(groups.counts) > 1 and has_grouped_kernel(hidden) and is_alike and len(hidden) and width % _ALIGNED == 0:
        out += -out % _ALIGNED
        alike = [padded(padded(stack, 2, width), 1, out) for stack in stacks]
        weights = torch.cat(alike) if len(alike) > 1 else alike[0]
        ends = groups.ends
        if ends is None:
            ends = torch.tensor(groups.counts, device=hidden.device).cumsum(0, dtype=torch.int32)
        return _by_kernel(hidden, weights, groups.counts, ends)
    pairs = zip(hidden.split(groups.counts), (weight for stack in stacks for weight in stack), strict=True)
    outs = [nn.functional.linear(own[:, : weight.size(1)].to(weight.dtype), weight) for own, weight in pairs]
    return torch.cat([padded(own, 1, out) for own in outs])  # cat promotes dtypes


def _by_kernel(hidden: Tensor, weights: Tensor, counts: list[int], ends: Tensor) -> Tensor:
    """Each token of ``[tokens, in]`` times the weight of its group, of ``[groups, out, in]``, by torch's kernel."""
    if len(counts) <= _MOST_GROUPS:
        return nn.functional.grouped_mm(hidden, weights.mT, offs=ends)
    first, rest = slice(_MOST_GROUPS), slice(_MOST_GROUPS, None)
    begun = sum(counts[first])
    sizes = _MOST_GROUPS, len(counts) - _MOST_GROUPS
    tokens, stacks = hidden.split([begun, len(hidden) - begun]), weights.split(sizes)
    groups = (counts[first], ends[first]), (counts[rest], ends[rest] - begun)
    parts = zip(tokens, stacks, groups, strict=True)
    return torch.cat([_by_kernel(own, weights, *of) for own, weights, of in parts if len(own)])


def has_grouped_kernel(hidden: Tensor) -> bool:
    """Whether torch has one kernel for all groups. Without, ``grouped_mm`` is a loop that first waits for the GPU."""
    is_there = hasattr(nn.functional, "grouped_mm") and hidden.is_cuda and hidden.dtype == torch.bfloat16
    return is_there and torch.cuda.get_device_capability(hidden.device)[0] in (9, 10)


def padded(tensor: Tensor, dim: int, size: int) -> Tensor:
    """``tensor`` with zeros at the end of ``dim``, up to ``size``."""
    absent = size - tensor.size(dim)
    return nn.functional.pad(tensor, (0, 0) * (tensor.dim() - 1 - dim) + (0, absent)) if absent else tensor
