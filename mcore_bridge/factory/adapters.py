"""Adds adapters to a model that is built: their factors by the rules of ``rules/adapters.py``, and all else frozen."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from mcore_bridge.errors import ConfigError
from mcore_bridge.rules.adapters import FACTORS, Adapters, adapter_rules, factor_name, rows_of_parts
from mcore_bridge.rules.layout import REPLICATED
from mcore_bridge.rules.mapping import Binding, Dialect, WeightMapping, axes_of, pattern_of
from mcore_bridge.rules.names import canonical
from mcore_bridge.rules.trace import Trace, moved_dim, trace
from mcore_bridge.weights.bound import BoundModel, Models, bind, chunks_of
from mcore_bridge.weights.model_tensors import numbering_of

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel

    from mcore_bridge.factory.modules.adapter import Kind


def add_adapters(
    models: Models,
    *,
    rank: int,
    alpha: float,
    targets: Sequence[str],
    dialect: Dialect | None = None,
    dtype: torch.dtype | None = None,
    seed: int = 0,
) -> Adapters:
    """Adds a low-rank adapter to each targeted linear layer and freezes all other parameters.

    Args:
        models: the chunks of this rank as ``build_model`` has made them, not yet wrapped.
        rank: the rank of each adapter.
        alpha: the adapter's output is multiplied by ``alpha / rank``.
        targets: ends of module names, in HF ("q_proj") or in mcore ("linear_qkv"); see ``adapter_rules``.
        dialect: "fused" gives gate and up of an expert one A, as ``peft`` does for transformers 5; "split" gives each
            its own. None is the dialect of the checkpoint that the models come from.
        dtype: of the factors, and of what they compute. None is that of the layer's weight, as it is or is cast later.
        seed: A is drawn from it and the HF name, as ``peft`` draws it, the same on every mesh. B is zero.

    Raises:
        ConfigError: a target or the model has no adapters here, or ``models`` have some, or are wrapped.
    """
    chunks = chunks_of(models)
    given = [models] if isinstance(models, nn.Module) else list(models)
    _require_fitting(chunks, given, rank=rank)
    bound = bind(models, dialect=dialect)
    mapping = WeightMapping(adapter_rules(bound.mapping.rules, targets))
    places = [place for chunk in chunks for place in _places(chunk, mapping)]
    made = Adapters(rank, alpha, mapping, frozenset(factor_name(name, end) for name, _ in places for end in FACTORS))
    _require_known(places)
    for chunk in chunks:
        chunk.requires_grad_(False)
        _let_recompute(chunk)
        chunk.bridge_adapters = made
    for mcore, linear in places:
        _add(bound, made, mcore, linear, dtype, seed)
    return made


def _places(chunk: GPTModel, mapping: WeightMapping) -> Iterator[tuple[str, Any]]:
    """The targeted linear layers of a chunk by canonical name."""
    numbering, patterns = numbering_of(chunk), {rule.mcore for rule in mapping.rules}
    for path, module in chunk.named_modules():
        if isinstance(getattr(module, "weight", None), Tensor):
            name = canonical(f"{path}.weight", numbering).removesuffix(".weight")
            if pattern_of(factor_name(name, "linear_in")) in patterns:
                yield name, module


def _add(bound: BoundModel, made: Adapters, mcore: str, linear: Any, dtype: torch.dtype | None, seed: int) -> None:
    from mcore_bridge.factory.modules.adapter import Adapter, Factor

    config = bound.chunks[0].config
    first, second = (made.mapping.bind(factor_name(mcore, end)) for end in FACTORS)
    shard, (out, width) = bound.ranks[first.axis], linear.weight.shape
    ins = _trace(bound, first, (len(first.hf) * made.rank, width))
    outs = _trace(bound, second, (out, made.rank))
    groups, like = bound.chunks[0].pg_collection, linear.weight
    adapter = Adapter(
        _kind(first, second),
        Factor(ins.shard_shape, like, dtype),
        Factor(outs.shard_shape, like, dtype),
        rows_of_parts(outs, shard).to(like.device),
        parts=len(first.hf),
        scale=made.alpha / made.rank,
        group=groups.expt_tp if first.axis == "etp" else groups.tp,
        sequence_parallel=config.sequence_parallel,
        expert=first.axis == "etp",
        allreduce=getattr(linear.weight, "allreduce", True),
    )
    drawn = tuple(_drawn(name, shape, seed) for name, shape in zip(first.hf, ins.part_shapes, strict=True))
    with torch.no_grad():
        adapter.linear_in.weight.copy_(ins.shard(shard, drawn, torch.float32))
    linear.adapter = adapter
    linear.register_forward_hook(adapter, prepend=True)  # our hook on latents reads the sum


def _trace(bound: BoundModel, binding: Binding, shape: tuple[int, int]) -> Trace:
    return trace(binding.layout, shape, axes_of(binding, bound.axes))


def _kind(first: Binding, second: Binding) -> Kind:
    if second.layout == REPLICATED:
        return "summed" if moved_dim(first.layout) == 1 else "whole"
    return "cut"


def _drawn(name: str, shape: tuple[int, ...], seed: int) -> Tensor:
    """A whole A, uniform between plus and minus ``1 / sqrt(in)``: what ``peft`` calls kaiming."""
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
    return (torch.rand(shape, generator=generator) * 2 - 1) / math.sqrt(shape[1])


def _let_recompute(chunk: GPTModel) -> None:
    """Has the first hidden state require a gradient: without one, a recomputed layer has no backward."""
    if chunk.pre_process and chunk.config.recompute_granularity:
        chunk.embedding.register_forward_hook(_requiring)


def _requiring(module: nn.Module, inputs: object, output: Tensor) -> None:
    if torch.is_grad_enabled() and not output.requires_grad:
        output.requires_grad_()


def _require_fitting(chunks: Sequence[GPTModel], given: Sequence[nn.Module], *, rank: int) -> None:
    config = chunks[0].config
    checks = (
        (rank < 1, f"rank must be at least 1, found {rank}"),
        (any(a is not b for a, b in zip(chunks, given, strict=True)), "models must not be wrapped yet: add first"),
        (any(hasattr(chunk, "bridge_adapters") for chunk in chunks), "models have adapters: one set is supported"),
        (config.mtp_num_layers, "models must have no MTP layers, whose adapters no engine reads: build without them"),
        (bool(chunks[0].bridge.tower), 'models must be of text: build with vision="carried"'),
        (config.moe_shared_expert_overlap, "moe_shared_expert_overlap must be False"),
    )
    if problems := [text for is_wrong, text in checks if is_wrong]:
        raise ConfigError("these models cannot have adapters: " + "; ".join(problems))


def _require_known(places: Sequence[tuple[str, nn.Module]]) -> None:
    """Raises unless each linear layer is one of those whose communication an adapter repeats."""
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear

    from mcore_bridge.factory.modules.experts import ExpertRowParallelLinear
    from mcore_bridge.factory.modules.latent_modules import ReplicatedLinear
    from mcore_bridge.factory.modules.torch_modules import always_biased

    plain = {ColumnParallelLinear, RowParallelLinear, ExpertRowParallelLinear, ReplicatedLinear}
    known = {*plain, always_biased(RowParallelLinear)}
    if wrong := {pattern_of(mcore): type(linear).__name__ for mcore, linear in places if type(linear) not in known}:
        raise ConfigError(
            f"adapters need linear layers of {sorted(kind.__name__ for kind in plain)}, found {wrong}: build with "
            'backend="torch", and leave out targets whose layers do more than a product'
        )
