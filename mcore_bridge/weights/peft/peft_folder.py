"""Reads a PEFT folder as the adapters of a model: tensors under HF names, with one rank and one scale.

A smaller rank is padded with zeros, which changes nothing. If scales differ, the most frequent scale is kept. The B of
a module with another scale is multiplied by the ratio, in fp64 and rounded once. This is exact if the ratio is a power
of two.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from mcore_bridge.composite import SPELLINGS
from mcore_bridge.config.hf import find_folder, read_fields
from mcore_bridge.errors import CheckpointError, ConfigError
from mcore_bridge.rules.adapters import ENDS, adapter_rules, base_name
from mcore_bridge.rules.mapping import (
    ExpertFormat,
    Prefixes,
    WeightMapping,
    pattern_of,
    respelled_module,
    respelled_name,
)
from mcore_bridge.rules.names import layer_of
from mcore_bridge.rules.trace import Shape
from mcore_bridge.weights.files.safetensors import SafetensorsFile
from mcore_bridge.weights.peft.peft_config import CONFIG, STACKS, WEIGHTS, PeftNames
from mcore_bridge.weights.peft.peft_read import PeftConfig, refused_in, unreadable_in
from mcore_bridge.weights.provenance import Provenance

_TEXT = "model."
_LANGUAGE = "language_model."
_FACTORS = ENDS[:2]
_ADVICE = (
    "Check that it was trained on this base. What other tensors and settings change can be merged into the base with "
    "merge_and_unload of peft"
)
_MANY = 30
"""The most reasons in one error. Adapters of another base have a reason for each module."""


@dataclass(frozen=True, slots=True)
class PeftFolder:
    """The adapters of a PEFT folder that fit a model.

    Attributes:
        config: the ranks, scales and targets of its config.
        tensors: the tensors by HF name, as views of the file. Experts in one tensor are ``[experts, ...]``.
        ranks, scales: the rank and scale of each module, by HF name.
        targets: patterns of all modules, for ``adapter_rules``.
        expert_format: the format of experts; None if no expert has an adapter.
        path: the folder.
        file: the file of the tensors.
    """

    config: PeftConfig
    tensors: Mapping[str, Tensor]
    ranks: Mapping[str, int]
    scales: Mapping[str, float]
    targets: tuple[str, ...]
    expert_format: ExpertFormat | None
    path: Path
    file: SafetensorsFile

    @property
    def rank(self) -> int:
        """The largest rank."""
        return max(self.ranks.values())

    @property
    def scale(self) -> float:
        """The most frequent scale of modules; in a tie, the largest of these."""
        counts = Counter(self.scales.values())
        return max(counts, key=lambda scale: (counts[scale], scale))

    @property
    def dora(self) -> bool:
        """Whether there are magnitudes of DoRA."""
        return self.config.dora

    @property
    def alpha(self) -> float:
        """The alpha for which all modules have this rank and this scale."""
        return self.config.alpha if self.scale == self.config.alpha / self.rank else self.scale * self.rank

    def factors(self, scale: float) -> dict[str, float]:
        """The factor for each B whose module has another scale, by HF name."""
        modules = {module: own / scale for module, own in self.scales.items() if own != scale}
        return {f"{module}{_FACTORS[1]}": factor for module, factor in modules.items()}

    def at(self, rank: int, scale: float) -> dict[str, Tensor]:
        """The tensors, converted to this rank and this scale."""
        factors = self.factors(scale)
        return {name: _at(name, tensor, rank, factors.get(name, 1.0)) for name, tensor in self.tensors.items()}


def open_peft(
    folder: str | os.PathLike[str], provenance: Provenance, *, num_layers: int, num_experts: int
) -> PeftFolder:
    """Open the adapters of a folder for a model, or of a repository in the local hub cache.

    Raises:
        ConfigError: there is neither.
        CheckpointError: the folder cannot be read, or it has unsupported features; the error names all of them.
    """
    require_peft_names(provenance)
    path = find_folder(folder, head=CONFIG)
    fields, file = read_fields(_config_in(path)), _weights_in(path)
    if problems := [*unreadable_in(fields)]:
        raise _refused(path, problems)
    config = PeftConfig.of(fields)
    naming = PeftNames(config.stacks, swapped=provenance.swapped_in_peft)
    own_names = {naming.to_hf(name): name for name in file.entries}
    modules = _modules(own_names)
    named = set(own_names.values())
    problems = [*refused_in(fields)]
    problems += [f"{own} is there under another name too" for own in file.entries if own not in named]
    if others := [name for name in own_names if not name.endswith(ENDS)]:
        problems.append(f"tensors must be factors of linear layers, found {len(others)} others: {others[:4]}")
    magnitudes = () if config.dora else (name for name in own_names if name.endswith(ENDS[2]))
    problems += [f"the config has no use_dora for {name}" for name in magnitudes]
    problems += [f"the config has no target for {module}" for module in modules if not config.has(module)]
    problems += [] if modules else [f"{file.path.name} has no adapter"]
    expert_format = _expert_format(modules, naming)
    mapping = provenance.mapping(tied=False, mtp=1, expert_format=expert_format)
    spelled = _spelled(modules, provenance, mapping)
    problems += _foreign(spelled.values(), mapping, num_layers, config.dora)
    tensors = {}
    for name, own in own_names.items():
        if name.endswith(ENDS):
            module = base_name(name)
            end = name.removeprefix(module)
            tensors[f"{spelled[module]}{end}"] = tensor = _whole(file, own, name, naming, num_experts)
            if end in _FACTORS and (held := tensor.shape[-2:][_FACTORS.index(end)]) != (rank := config.rank_of(module)):
                problems.append(f"{own} has rank {held}, the config says {rank}")
    if problems:
        raise _refused(path, problems)
    ranks = {new: config.rank_of(old) for old, new in spelled.items()}
    scales = {new: config.scale_of(old) for old, new in spelled.items()}
    return PeftFolder(config, tensors, ranks, scales, _targets(spelled.values(), mapping), expert_format, path, file)


def is_beside_text(folder: str | os.PathLike[str], provenance: Provenance) -> bool:
    """Whether an adapter of a composite has modules that are not in the text, so that they may be in the tower."""
    if provenance.whole is None or provenance.whole.composite.without_tower:
        return False
    naming = PeftNames(STACKS, swapped=provenance.swapped_in_peft)
    modules = _modules(map(naming.to_hf, stored_dtypes(find_folder(folder, head=CONFIG))))
    mapping = provenance.mapping(tied=False, mtp=1, expert_format=_expert_format(modules, naming))
    spelled = _spelled(modules, provenance, mapping).values()
    return not all(mapping.consumers(_weight(name, mapping)) for name in spelled if not naming.is_stack(name))


def _modules(names: Iterable[str]) -> dict[str, None]:
    """The modules with adapters, from the names of tensors."""
    return dict.fromkeys(base_name(name) for name in names if name.endswith(ENDS))


def _at(name: str, tensor: Tensor, rank: int, factor: float) -> Tensor:
    """A factor, padded with zeros up to ``rank`` and multiplied by ``factor``; magnitudes as they are."""
    if not name.endswith(_FACTORS):
        return tensor
    is_first = name.endswith(_FACTORS[0])
    missing = rank - tensor.shape[-2 if is_first else -1]
    if factor != 1.0:
        tensor = (tensor.double() * factor).to(tensor.dtype)
    return torch.nn.functional.pad(tensor, (0, 0, 0, missing) if is_first else (0, missing)) if missing else tensor


def _config_in(folder: Path) -> Path:
    if (folder / CONFIG).is_file():
        return folder / CONFIG
    inside = sorted(path.parent.name for path in folder.glob(f"*/{CONFIG}"))
    advice = f"name one of the adapters in it: {inside}" if inside else "name a folder that peft has saved"
    raise CheckpointError(f"expected {CONFIG} in {folder}, found none: {advice}")


def _weights_in(folder: Path) -> SafetensorsFile:
    if not (folder / WEIGHTS).is_file():
        raise CheckpointError(
            f"expected {WEIGHTS} in {folder}, found none: save the adapter with peft again, with safe_serialization"
        )
    return SafetensorsFile(folder / WEIGHTS)


def require_shapes(folder: Path, given: PeftFolder, wanted: Mapping[str, Shape]) -> None:
    """Raise if factors do not fit the weights that they change.

    Args:
        given: the adapters of ``folder``, whose ranks have been checked.
        wanted: the shape of a factor by HF name, at any rank; for experts in one tensor, the shape for one expert.

    Raises:
        CheckpointError: naming all that differ.
    """
    problems = []
    for name, shape in wanted.items():
        dim = {_FACTORS[1]: -2}.get(name.removeprefix(base_name(name)), -1)
        if (size := given.tensors[name].shape[dim]) != shape[dim]:
            side = "columns" if name.endswith(_FACTORS[0]) else "rows"
            problems.append(f"{name} has {size} {side}, and its weight takes {shape[dim]}")
    if problems:
        raise _refused(folder, problems)


def stored_dtypes(folder: Path) -> dict[str, torch.dtype]:
    """The dtype of each tensor of a PEFT folder by its name there; empty if it has no weights."""
    if not (folder / WEIGHTS).is_file():
        return {}
    file = _weights_in(folder)
    return {name: file.tensor(name).dtype for name in file.entries}


def _refused(folder: Path, problems: Sequence[str]) -> CheckpointError:
    different = [*dict.fromkeys(problems)]
    more = f"; and {len(different) - _MANY} more" if len(different) > _MANY else ""
    return CheckpointError(f"the adapter in {folder} cannot be used: {'; '.join(different[:_MANY])}{more}. {_ADVICE}")


def _expert_format(modules: Iterable[str], naming: PeftNames) -> ExpertFormat | None:
    if any(map(naming.is_stack, modules)):
        return "fused"
    return "split" if any(".experts.*." in pattern_of(module) for module in modules) else None


def _weight(module: str, mapping: WeightMapping) -> str:
    """The name of the weight of a module; for a stack of experts, the name of the parameter."""
    return module if mapping.consumers(module) else f"{module}.weight"


def _targets(modules: Iterable[str], mapping: WeightMapping) -> tuple[str, ...]:
    """The patterns of modules, without repetitions."""
    return tuple(dict.fromkeys(mapping.pattern(_weight(name, mapping)).removesuffix(".weight") for name in modules))


def _spelled(modules: Iterable[str], provenance: Provenance, mapping: WeightMapping) -> dict[str, str]:
    """Each module, with its name in the model's folder, or its own name if the folder lacks it.

    In memory, where ``peft`` finds them, transformers gives the modules of a composite another prefix than the files
    have. For some families it renames modules, too.
    """
    modules = [*modules]

    def is_known(name: str) -> bool:
        return bool(mapping.consumers(_weight(name, mapping)))

    if not provenance.spelling:
        candidates_of = {module: _in_files(module, provenance.renamed_in_memory) for module in modules}
        return {module: next(filter(is_known, names), names[0]) for module, names in candidates_of.items()}
    plain = [[_unspelled(module, spelling) for module in modules] for spelling in (provenance.spelling, *SPELLINGS)]
    candidates = [[respelled_name(name, provenance.spelling) for name in names] for names in plain]
    best = max(candidates, key=lambda names: sum(map(is_known, names)))
    in_tower = _inverse(tower_prefixes(provenance))
    return {
        old: next(filter(is_known, (new, respelled_module(old, in_tower))), old)
        for old, new in zip(modules, best, strict=True)
    }


def require_peft_names(provenance: Provenance) -> None:
    """Require that modules of the model's folder are modules in transformers' memory, whose names ``peft`` uses.

    Raises:
        ConfigError: the text of a composite is published in other modules.
    """
    if provenance.whole is not None and provenance.whole.composite.rules is not None:
        name = provenance.whole.composite.model_type
        raise ConfigError(
            f"A folder of adapters must be of a model whose files have the modules of transformers' memory, found "
            f"{name}, whose files have others. Export weights with adapters merged, or train a folder of its text "
            "alone."
        )


def memory_prefixes(provenance: Provenance) -> Prefixes:
    """The prefixes of text and tower in the model's folder, each with its prefix in transformers' memory.

    They are empty if releases of transformers differ.
    """
    in_memory = () if provenance.whole is None else provenance.whole.composite.in_memory
    if not provenance.spelling or in_memory is None:
        return ()
    text = respelled_name(_TEXT, provenance.spelling), respelled_name(_TEXT, in_memory)
    return (text, *tower_prefixes(provenance))


def tower_prefixes(provenance: Provenance) -> Prefixes:
    """The prefixes of a tower in the model's folder, each with its prefix in transformers' memory.

    Args:
        provenance: of a model. Without a tower, there are none.
    """
    if provenance.whole is None or not provenance.tower or not (in_memory := provenance.whole.composite.in_memory):
        return ()
    beside = respelled_name(_TEXT, in_memory).removesuffix(_LANGUAGE)
    spelling = provenance.whole.tower
    catches_all = any(not old for old, _ in spelling)
    return tuple((new, f"{beside}{old}") for old, new in (*spelling, *(() if catches_all else (("", ""),))))


def _in_files(module: str, renamed: Prefixes) -> list[str]:
    """The possible names of a module in files, from its name in memory. Two names in files may have one in memory."""
    names = [module]
    for old, new in renamed:
        names = [*dict.fromkeys([*(name.replace(new, old) for name in names), *names])]
    return names


def _inverse(spelling: Prefixes) -> Prefixes:
    return tuple((new, old) for old, new in spelling)


def _unspelled(name: str, spelling: Prefixes) -> str:
    return respelled_name(name, _inverse(spelling))


def _foreign(modules: Iterable[str], mapping: WeightMapping, num_layers: int, dora: bool) -> Iterator[str]:
    """Yield the reasons why modules cannot have adapters."""
    known = []
    for module in modules:
        weight = _weight(module, mapping)
        users = mapping.consumers(weight)
        layers = {layer for name in users if (layer := layer_of(name)) is not None}
        in_mtp = any(name.startswith("mtp.") for name in users) and not any(layer < num_layers for layer in layers)
        if in_mtp or mapping.is_unbuilt_mtp(weight):
            yield f"{module} is in an MTP layer, whose adapters no engine reads"
        elif mapping.is_not_built(weight):
            yield f"{module} is in the tower, which is not built: build with vision='frozen'"
        elif not users or (layers and min(layers) >= num_layers):
            yield f"{module} is no module of this model"
        else:
            known.append(module)
    try:
        adapter_rules(mapping.rules, _targets(known, mapping), dora=dora)
    except ConfigError as error:
        yield str(error).partition(": ")[2]


def _whole(file: SafetensorsFile, own: str, name: str, naming: PeftNames, num_experts: int) -> Tensor:
    """A factor from the file; for experts in one tensor, ``[experts, ...]``."""
    tensor = file.tensor(own)
    try:
        if tensor.dim() != (num_dims := 2 if name.endswith(_FACTORS) else 1):
            raise ValueError(f"expected {num_dims} dims")
        return naming.stacked(name, tensor, num_experts) if naming.is_stack(base_name(name)) else tensor
    except (ValueError, RuntimeError) as error:  # einops raises EinopsError, a RuntimeError
        experts = f" of {num_experts} experts" if naming.is_stack(base_name(name)) else ""
        raise CheckpointError(f"{own} of shape {tuple(tensor.shape)} is no factor{experts}: {error}") from None
