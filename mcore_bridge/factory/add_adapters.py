"""Add adapters to a built model, by the rules of ``rules/adapters.py``, and freeze all other parameters."""

from __future__ import annotations

import hashlib
import math
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import Tensor, nn

from mcore_bridge.architecture import is_draft
from mcore_bridge.arguments import NAMES, accepts_former_names, is_count
from mcore_bridge.config.fields import is_dropout, is_number
from mcore_bridge.config.mesh.alike import Shared, agreed, replica_groups
from mcore_bridge.errors import CheckpointError, ConfigError, shown
from mcore_bridge.factory.adapter_sets import keep, lay_aside, sets_of, use
from mcore_bridge.factory.modules.backend import has_transformer_engine, unchanged
from mcore_bridge.rules.adapters import (
    ALL_LINEAR,
    DEFAULT_TARGETS,
    FACTORS,
    MAGNITUDE,
    Adapters,
    Sharing,
    adapter_rules,
    all_linear,
    base_name,
    factor_name,
    modules_of_adapter,
    rows_of_parts,
)
from mcore_bridge.rules.dtypes import DtypeLike, as_dtype, problem_of
from mcore_bridge.rules.layout import REPLICATED
from mcore_bridge.rules.mapping import Binding, ExpertFormat, WeightMapping, axes_of, pattern_of
from mcore_bridge.rules.names import TOWER, canonical, kind_of
from mcore_bridge.rules.trace import Trace, moved_dim, trace
from mcore_bridge.weights.bound import BoundModel, bind, provenance_on
from mcore_bridge.weights.dist_checkpoint.adapter_shards import sharded_state_dict
from mcore_bridge.weights.files.hf_folder import content_of
from mcore_bridge.weights.model_chunks import Models, all_chunks_of, chunks_of, groups_of, modules_of, numbering_of
from mcore_bridge.weights.model_tensors import entries_of
from mcore_bridge.weights.own_folder import note_source
from mcore_bridge.weights.peft.hf_adapters import load_peft, open_peft_for
from mcore_bridge.weights.peft.peft_folder import PeftFolder
from mcore_bridge.weights.transfer.collectives import Group

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel

    from mcore_bridge.factory.modules.adapter import Adapter, Kind

Init = Literal["kaiming", "xavier", "normal"]
"""The distribution of the initial A ``[rank, in]``: uniform between plus and minus ``1 / sqrt(in)``; normal with a
variance of ``2 / (in + rank)``; or normal with a deviation of 0.2.
"""
Place = tuple[str, Any, str]
"""The canonical name of a weight without ``.weight``, the layer that holds it, and its name in the layer.

A layer of TransformerEngine for experts holds several.
"""
Places = Mapping[str, Sequence[Place]]
"""The weights of each adapter, by the name of its weight; of the experts of a layer, by a name with ``*``."""
Draw = Callable[[str, tuple[int, ...]], Tensor]
_OF_NEW = ("rank", "alpha", "dora", "targets")
_WEIGHT = re.compile(r"weight\d*")
_LOCAL_EXPERT = re.compile(r"(?<=\.experts)\.local_experts\.\d+")
_UNTRIED = (
    "fp8",
    "fp4",
    "tp_comm_overlap",
    "use_transformer_engine_op_fuser",
    "delay_wgrad_compute",
    "cpu_offloading",
    "qk_clip",
)
"""Settings of megatron-core that change the outputs, weights or communication of its linear layers."""


@accepts_former_names
def add_adapters(
    models: Models,
    folder: str | os.PathLike[str] | None = None,
    *,
    rank: int | None = None,
    alpha: float | None = None,
    targets: Sequence[str] | Literal["all-linear"] | None = None,
    kind: Sharing = "own",
    dropout: float | None = None,
    dora: bool | None = None,
    expert_format: ExpertFormat | None = None,
    dtype: DtypeLike | None = None,
    init: Init = "kaiming",
    seed: int = 0,
    name: str = "default",
) -> Adapters:
    """Add a low-rank adapter to each targeted linear layer, and freeze all other parameters.

    Either ``rank`` and ``alpha`` describe new adapters, or ``folder`` has the adapters. Call this before
    the models are wrapped. If it raises, nothing has changed. All ranks of a replica call it together, and compare
    their arguments first.

    Args:
        models: the chunks of this rank from ``build_model``, not yet wrapped.
        folder: a folder of ``peft`` or ``save_hf_adapters``, or its name in the local hub cache, with rank, scale and
            targets. All adapters get its largest rank; see ``load_adapters`` for exactness. Every rank reads it.
        rank: the rank of each adapter.
        alpha: the adapter's output is multiplied by ``alpha / rank``.
        targets: ends of module names, in HF ("q_proj", "mlp.down_proj", "experts.gate_up_proj") or in megatron-core
            ("linear_qkv", of the decoder alone). Each must match something. Projections that are not named get no
            adapter. "all-linear" names all linear layers that can have one, also of a tower that is built. None means
            the targets that ``peft`` has for the family.
        kind: "own" gives each HF projection a separate A, like ``peft``. "shared" gives each layer of mcore one A for
            all of its projections, like Megatron-Bridge by default; a folder repeats it for each projection.
        dropout: the probability with which a forward in training mode zeroes an element of the input of A. None means
            the dropout of the folder, or 0.
        dora: whether to train a magnitude for each row, as ``use_dora`` of ``peft``. It begins as the length of the row
            of the weight, so load the base before. A folder decides for itself.
        expert_format: "fused" gives gate and up of an expert one A, like ``peft`` for transformers 5; "split" gives
            each a separate A. None means the format of the models' checkpoint. A folder decides for itself.
        dtype: the dtype of the factors and their computations; tensors of a folder are cast to it. None or "auto" means
            the dtype of the layer's weight, also after later casts; then it must hold all values of the folder.
        init: the distribution of A: "kaiming" is ``peft``'s; "xavier" and "normal" are Megatron-Bridge's.
        seed: A is drawn from the seed and the HF name, equally on every mesh. B is zero.
        name: the name of these adapters. A base can have several sets, and these are in use until ``set_adapters``.

    Returns:
        Rank, scale and rules of the adapters.

    Raises:
        ConfigError: a target or the model cannot have adapters, or ``models`` are wrapped, or have a set of this name.
        CheckpointError: the folder has unsupported features, or does not fit the models; as ``load_adapters``.

    Example:
        >>> policy = mb.build_model("path/of/Qwen3-8B", dims=dims, dtype=torch.float32)
        >>> adapters = mb.add_adapters(policy, rank=16, alpha=32, targets=["q_proj", "v_proj"])
        >>> sum(parameter.requires_grad for parameter in policy[0].parameters())   # A and B of linear_qkv, 4 layers
        8
    """
    groups, dtype = groups_of(models), as_dtype(dtype)

    def checked() -> tuple[tuple[Adapters, Places, dict[str, Adapter], Mapping[str, bool], Path | None], Shared]:
        chunks = all_chunks_of(models)
        if problem := problem_of(dtype):
            raise ConfigError(problem)
        asked: dict[str, Any] = {"rank": rank, "alpha": alpha, "targets": targets, "expert_format": expert_format}
        asked["dora"] = dora
        _require_fitting(chunks, models, folder, kind, init, dropout, name, **asked)
        given = None if folder is None else open_peft_for(models, folder)
        asked = asked if given is None else {name: getattr(given, name) for name in asked}
        bound = bind(models, expert_format=asked["expert_format"], merged=False)
        targeted = _targeted(bound, asked["targets"])
        mapping = WeightMapping(adapter_rules(bound.mapping.rules, targeted, kind, dora=bool(asked["dora"])))
        places = _by_adapter(mapping, [place for chunk in chunks for place in _places(chunk, mapping)])
        ends = modules_of_adapter(bool(asked["dora"]))
        held = [place for of_adapter in places.values() for place in of_adapter]
        names = frozenset(factor_name(name, end) for name, *_ in held for end in ends)
        zeroed = dropout if dropout is not None else given.config.dropout if given is not None else 0.0
        made = Adapters(asked["rank"], asked["alpha"], mapping, names, kind, zeroed, bool(asked["dora"]))
        _require_known(held)
        _require_droppable(bound, made)
        draw = partial(_drawn, seed, init)
        adapters = {name: _made(bound, made, of_adapter, dtype, draw) for name, of_adapter in places.items()}
        if given is not None:
            _require_all(bound, given, mapping, names)
            pairs = ((of_adapter, adapters[name]) for name, of_adapter in places.items())
            factors = {name: factor for pair in pairs for name, factor in _factors(*pair)}
            load_peft(replace(bound, mapping=mapping, tensors=factors), made, given, dtype)
        path = None if given is None else given.path
        content = None if path is None else content_of(path)
        shared = {**asked, "alpha": float(made.alpha), "targets": sorted(targeted), "folder": content}
        shared |= {
            "kind": kind,
            "dtype": dtype,
            "init": init,
            "seed": seed,
            "dropout": float(made.dropout),
            "name": name,
        }
        named = () if asked["targets"] == ALL_LINEAR else targeted
        return (made, places, adapters, _held_here(bound, named, names), path), shared

    made, places, adapters, held, path = agreed(replica_groups(groups), checked, ConfigError)
    _require_held(Group(groups.pp), held)
    if made.dora and path is None:
        _measure(places, adapters)
    for chunk in chunks_of(models):
        lay_aside(chunk)
        chunk.requires_grad_(False)
        if not sets_of(chunk).by_name:
            _let_recompute(chunk)
            inner = vars(chunk).get("sharded_state_dict")  # of a chunk without a head
            # A deep copy of the chunk gets a partial of its own
            chunk.sharded_state_dict = partial(sharded_state_dict, chunk, inner)
        keep(chunk, name, made, _by_layer(chunk, places, adapters))
        use(chunk, name)
    if path is not None:
        note_source(models, path)
    return made


def _targeted(bound: BoundModel, targets: Sequence[str] | None) -> tuple[str, ...]:
    """The ends of module names that ``targets`` of ``add_adapters`` mean.

    Raises:
        ConfigError: there are none, and ``peft`` chooses none for the family.
    """
    if targets == ALL_LINEAR:
        return all_linear(bound.mapping.rules)
    if targets is not None:
        return tuple(targets)
    provenance = provenance_on(bound.chunks)
    family = (provenance.hf if provenance.whole is None else provenance.whole.config).model_type
    if family not in DEFAULT_TARGETS:
        raise ConfigError(
            f"peft chooses no targets for {family!r}: pass targets=, such as ['q_proj', 'v_proj'] or {ALL_LINEAR!r}"
        )
    return DEFAULT_TARGETS[family]


@torch.no_grad()
def _measure(places: Places, adapters: Mapping[str, Adapter]) -> None:
    """Let magnitudes begin as the lengths of the rows, so that an adapter of DoRA begins without an effect."""
    for name, ((_, linear, own),) in places.items():  # experts have no DoRA
        adapter = adapters[name]
        assert adapter.magnitude is not None
        lengths = adapter.lengths_of_rows(getattr(linear, own))
        adapter.magnitude.weight.copy_(lengths * adapter.has_row())


def _places(chunk: GPTModel, mapping: WeightMapping) -> Iterator[Place]:
    numbering, patterns = numbering_of(chunk), {rule.mcore for rule in mapping.rules}
    for path, module in chunk.named_modules():
        for own in [own for own, _ in module.named_parameters(recurse=False) if _WEIGHT.fullmatch(own)]:
            name = canonical(f"{path}.{own}", numbering).removesuffix(".weight")
            if pattern_of(factor_name(name, "linear_in")) in patterns:
                yield name, module, own


def _by_adapter(mapping: WeightMapping, places: Iterable[Place]) -> Places:
    """The weights of each adapter. One has those of all experts of a layer, in their order on this rank."""
    of_adapters: dict[str, list[Place]] = {}
    for place in places:
        name = place[0]
        is_expert = mapping.bind(factor_name(name, next(iter(FACTORS)))).axis == "etp"
        of_adapters.setdefault(kind_of(name) if is_expert else name, []).append(place)
    return of_adapters


def _by_layer(chunk: GPTModel, places: Places, adapters: Mapping[str, Adapter]) -> dict[str, nn.Module]:
    """The adapters of a chunk by the path of their layer. Layers of experts have the path of one layer for all."""
    paths = {id(module): path for path, module in chunk.named_modules()}
    layers = ((name, linear) for name, ((_, linear, _), *_) in places.items())
    return {_LOCAL_EXPERT.sub("", paths[id(linear)]): adapters[name] for name, linear in layers if id(linear) in paths}


def _factors(places: Sequence[Place], adapter: Adapter) -> Iterator[tuple[str, Tensor]]:
    """Yield the canonical name of each tensor of an adapter, with the tensor."""
    for end, factor, _ in adapter.tensors:
        parts = entries_of(factor) if adapter.expert else (factor,)
        yield from ((factor_name(name, end), own) for (name, *_), own in zip(places, parts, strict=True))


def _require_all(bound: BoundModel, given: PeftFolder, mapping: WeightMapping, names: Iterable[str]) -> None:
    """Raise if a folder lacks the adapter of a module of this rank that its config lists, or has in other layers.

    Args:
        mapping, names: the rules of the adapters, and the canonical names of the factors on this rank.
    """
    bindings = map(bound.mapping.bind, bound.tensors)
    known = [binding for binding in bindings if binding.axis == "tp" or given.expert_format == "split"]
    weights = (name for binding in known for name in binding.hf if name.endswith(".weight"))
    modules = (name.removesuffix(".weight") for name in weights)
    if absent := [module for module in modules if given.config.lists(module) and module not in given.ranks]:
        raise CheckpointError(f"the adapter's config has {len(absent)} targets without tensors, such as {absent[:4]}")
    factors = (hf.partition("[")[0] for name in sorted(names) for hf in mapping.bind(name).hf)
    if absent := [module for module in dict.fromkeys(map(base_name, factors)) if module not in given.ranks]:
        raise CheckpointError(
            f"all layers must have the adapter's modules, found {len(absent)} without, such as {absent[:4]}: merge the "
            "adapter into the base, by mcore-bridge merge"
        )


def _made(bound: BoundModel, made: Adapters, places: Sequence[Place], dtype: torch.dtype | None, draw: Draw) -> Adapter:
    """The adapter of a weight, or of the weights of all experts of a layer."""
    from mcore_bridge.factory.modules.adapter import Adapter, Dropout, ExpertAdapters, Factor

    config, groups = bound.chunks[0].config, bound.chunks[0].pg_collection
    mcore, linear, own = places[0]
    weight = getattr(linear, own)
    first, second = (made.mapping.bind(factor_name(mcore, end)) for end in FACTORS)
    shard, (out, width) = bound.ranks[first.axis], weight.shape
    ins = _trace(bound, first, (len(first.hf) * made.rank, width))
    outs = _trace(bound, second, (out, made.rank))
    kind, is_expert, magnitude = _kind(first, second), first.axis == "etp", None
    if made.dora:
        third = made.mapping.bind(factor_name(mcore, *MAGNITUDE))
        magnitude = Factor(_trace(bound, third, (out,)).shard_shape, weight, dtype)
    sequence_parallel = config.sequence_parallel and kind != "equal"
    is_cut = kind == "summed" or (sequence_parallel and not is_expert)
    cut: dict[str, Any] = {"is_cut": is_cut, "expert": is_expert, "expert_rank": groups.ep.rank()}
    ahead = (len(places),) if is_expert else ()
    adapter = (ExpertAdapters if is_expert else Adapter)(
        kind,
        Factor((*ahead, *ins.shard_shape), weight, dtype),
        Factor((*ahead, *outs.shard_shape), weight, dtype),
        rows_of_parts(outs, shard).clamp(max=len(first.hf) - 1).to(weight.device),
        scale=made.alpha / made.rank,
        group=groups.expt_tp if is_expert else groups.tp,
        sequence_parallel=sequence_parallel,
        expert=is_expert,
        allreduce=getattr(weight, "allreduce", True),
        magnitude=magnitude,
        dropout=Dropout(made.dropout, **cut) if made.dropout else None,
    )
    with torch.no_grad():
        for (name, *_), (_, factor) in zip(places, _factors(places, adapter), strict=False):  # A comes first
            drawn = tuple(map(draw, made.mapping.bind(factor_name(name, next(iter(FACTORS)))).hf, ins.part_shapes))
            factor.copy_(ins.shard(shard, drawn, torch.float32))
    return adapter


def _require_droppable(bound: BoundModel, made: Adapters) -> None:
    """Raise if an adapter cannot have the dropout of ``made``."""
    config, names = bound.chunks[0].config, {name for rule in made.mapping.rules for name in rule.hf}
    reasons = []
    if stacks := sorted({base_name(name) for name in names if name.endswith("[*]")}):
        reasons.append(
            f"{stacks} have all experts in one tensor, where peft refuses dropout: pass dropout=0, or "
            'expert_format="split"'
        )
    read = [name for name in made.names if name.endswith(f".linear_kv_up_proj.adapter.{next(iter(FACTORS))}.weight")]
    if read and config.experimental_attention_variant == "dsa":
        reasons.append(f"sparse attention reads the weight of {sorted(read)[0]} and has no input for dropout: pass 0")
    if made.dropout and reasons:
        raise ConfigError(f"dropout={made.dropout} is not possible: " + "; ".join(reasons))


def _trace(bound: BoundModel, binding: Binding, shape: tuple[int, ...]) -> Trace:
    return trace(binding.layout, shape, axes_of(binding, bound.axes))


def _kind(first: Binding, second: Binding) -> Kind:
    if first.mcore.startswith(TOWER):
        return "equal"
    if second.layout == REPLICATED:
        return "summed" if moved_dim(first.layout) == 1 else "whole"
    return "cut"


def _drawn(seed: int, init: Init, name: str, shape: tuple[int, ...]) -> Tensor:
    """Random values of a whole A."""
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
    if init == "kaiming":
        return (torch.rand(shape, generator=generator) * 2 - 1) / math.sqrt(shape[1])
    return torch.randn(shape, generator=generator) * (0.2 if init == "normal" else math.sqrt(2 / sum(shape)))


def _let_recompute(chunk: GPTModel) -> None:
    """Let the first hidden state require a gradient: without one, a recomputed layer has no backward."""
    if chunk.pre_process and chunk.config.recompute_granularity:
        chunk.embedding.register_forward_hook(_requiring)


def _requiring(module: nn.Module, inputs: object, output: Tensor) -> None:
    if torch.is_grad_enabled() and not output.requires_grad:
        output.requires_grad_()


def _require_fitting(
    chunks: Sequence[GPTModel],
    models: Models,
    folder: object,
    kind: object,
    init: object,
    dropout: object,
    name: object,
    **asked: Any,
) -> None:
    config, rank, alpha, dora, targets = chunks[0].config, *(asked[name] for name in _OF_NEW)
    given = modules_of(models)
    absent = [name for name in ("rank", "alpha") if asked[name] is None]
    twice = [name for name, value in asked.items() if folder is not None and value is not None]
    checks = (
        (folder is None and absent, f"expected rank= and alpha=, or a folder, found no {absent}"),
        (
            dropout is not None and not is_dropout(dropout),
            f"dropout must be a number from 0 to below 1, found {shown(dropout)}: pass a number such as 0.05",
        ),
        (
            dora is not None and not isinstance(dora, bool),
            f"dora must be True or False, found {shown(dora)}: pass one of them",
        ),
        (kind not in get_args(Sharing), f"kind must be one of {get_args(Sharing)}, found {kind!r}: pass one of them"),
        (init not in get_args(Init), f"init must be one of {get_args(Init)}, found {init!r}: pass one of them"),
        (twice, f"a folder decides on {twice}: leave them out"),
        (
            folder is not None and not isinstance(folder, str | os.PathLike),
            f"folder must be the path of an adapter, found {shown(folder)}; new adapters need rank=, alpha=, targets=",
        ),
        (
            targets not in (None, ALL_LINEAR) and not (NAMES.is_good(targets) and targets),
            f"targets must be a list of module names, such as ['q_proj', 'v_proj'], or {ALL_LINEAR!r}, found "
            f"{shown(targets)}: pass one of these",
        ),
        (
            rank is not None and not is_count(rank),
            f"rank must be at least 1, found {shown(rank)}: pass an int such as 16",
        ),
        (
            alpha is not None and not is_number(alpha),
            f"alpha must be a finite number, found {shown(alpha)}: pass a number such as 32",
        ),
        (
            any(a is not b for a, b in zip(chunks, given, strict=True)),
            "models must not be wrapped yet: add adapters first",
        ),
        (not (isinstance(name, str) and name), f"name must be a name, found {shown(name)}: pass a string"),
        (name in list(sets_of(chunks[0]).by_name), f"models have adapters named {shown(name)}: pass another name="),
        (is_draft(chunks[0].bridge.hf), "models must be no draft head, which is small: train all of its weights"),
        (config.mtp_num_layers, "models must have no MTP layers, whose adapters no engine reads: build without them"),
        (
            chunks[0].bridge.vision == "train",
            'adapters freeze all other parameters: build with vision="frozen" or "text_only"',
        ),
        (
            config.moe_router_enable_expert_bias and config.moe_router_bias_update_rate,
            "moe_router_bias_update_rate must be 0: each step would change the base",
        ),
        *((getattr(config, name, None), f"{name} must be off") for name in (*_UNTRIED, "moe_shared_expert_overlap")),
    )
    if problems := [text for is_wrong, text in checks if is_wrong]:
        raise ConfigError("these models cannot have adapters: " + "; ".join(problems))


def _held_here(bound: BoundModel, targets: Iterable[str], names: Collection[str]) -> dict[str, bool]:
    """Whether this rank has a layer of each target, in an order that is equal on all ranks."""
    held = set(map(pattern_of, names))
    rules = {name: adapter_rules(bound.mapping.rules, [name]) for name in sorted(targets)}
    return {name: not held.isdisjoint(rule.mcore for rule in of_target) for name, of_target in rules.items()}


def _require_held(stages: Group, held: Mapping[str, bool]) -> None:
    """Raise on all stages if a target matches a rule of the family, but no layer of any stage."""
    absent = [name for name, somewhere in zip(held, stages.most([*held.values()]), strict=True) if not somewhere]
    if absent and (stages.size == 1 or not stages.is_fake):
        raise ConfigError(f"targets must name layers that the model has, found {absent}: leave them out")


def _require_known(places: Sequence[Place]) -> None:
    """Raise unless each linear layer has a class whose communication an adapter can repeat."""
    known = _known()
    unknown = [place for place in places if unchanged(type(place[1])) not in known]
    if wrong := {pattern_of(name): type(linear).__name__ for name, linear, _ in unknown}:
        raise ConfigError(
            f"adapters need linear layers of {sorted(kind.__name__ for kind in known)}, found {wrong}: leave out "
            "targets whose layers compute more than a product"
        )


def _known() -> set[type]:
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear

    from mcore_bridge.factory.modules.experts import ExpertRowParallelLinear
    from mcore_bridge.factory.modules.latent import ReplicatedLinear
    from mcore_bridge.factory.modules.torch_modules import always_biased

    known = {nn.Linear, ColumnParallelLinear, RowParallelLinear, ExpertRowParallelLinear, ReplicatedLinear}
    known.add(always_biased(RowParallelLinear))
    if has_transformer_engine():
        from megatron.core.extensions import transformer_engine as te

        known |= {te.TELinear, te.TEColumnParallelLinear, te.TELayerNormColumnParallelLinear, te.TERowParallelLinear}
        known |= {te.TEColumnParallelGroupedLinear, te.TERowParallelGroupedLinear}
        known.add(always_biased(te.TERowParallelLinear))
    return known
