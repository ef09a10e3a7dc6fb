"""Settings of trainers for a mesh. All have megatron-core's names, in sections of their own."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from difflib import get_close_matches

from mcore_bridge.errors import MeshError, shown

SECTIONS = {"verl": ("actor_rollout_ref", "actor", "megatron"), "nemo-rl": ("policy", "megatron_cfg")}
"""By trainer, the path to the section with the mesh in its YAML. slime has arguments of a command line instead."""
OVERRIDES = "override_transformer_config"
"""The section within verl's in which the split of the pipeline stands."""
TP, ETP, SP = "tensor_model_parallel_size", "expert_tensor_parallel_size", "sequence_parallel"


def sizes_in(settings: object, ours: Mapping[str, str], names: Collection[str]) -> dict[str, object]:
    """The sizes in settings, by megatron-core's names.

    Args:
        settings: the whole settings of a trainer, or the section with the mesh. Its other keys do not matter.
        ours: our name for some of megatron-core's. Settings may have these instead.
        names: all names of megatron-core.

    Raises:
        MeshError: they are no mapping, have no size of a mesh, or have one twice or misspelt.
    """
    if not isinstance(settings, Mapping):
        raise MeshError(
            f"the settings of a mesh must be a mapping of names to values, found {shown(settings)}: pass a dict"
        )
    section = _section(settings)
    split = overrides if isinstance(overrides := section.get(OVERRIDES), Mapping) else {}
    given = {str(name): value for name, value in section.items()}
    given |= {str(name): value for name, value in split.items() if name in names}
    known = {*ours.values(), *names}
    others, absent = given.keys() - known, known - given.keys()
    near = {name: get_close_matches(name, absent, n=1, cutoff=0.88) for name in sorted(others)}
    problems = [f"{name} (do you mean {match[0]}?)" for name, match in near.items() if match]
    problems += [f"{name} and {own}" for name, own in ours.items() if name != own and {name, own} <= given.keys()]
    if problems or given.keys().isdisjoint(known):
        actual = ", ".join(problems) or f"none among {shown([*given])}"
        raise MeshError(
            f"settings of a mesh must have each size once, by names such as {TP} or tp, found {actual}: correct them"
        )
    is_ours = not given.keys().isdisjoint(ours.values() - ours.keys())
    sizes = {name: given[key] for name in names for key in (name, ours.get(name, name)) if key in given}
    sizes.setdefault(ETP, 1 if is_ours else None)  # for megatron-core, a missing one is tp
    if not is_ours and (sizes.get(TP) or 1) == 1:
        sizes[SP] = False  # which megatron-core turns off, too
    return sizes


def _section(settings: Mapping[str, object]) -> Mapping[str, object]:
    for path in SECTIONS.values():
        section: object = settings
        for key in path:
            section = section.get(key) if isinstance(section, Mapping) else None
        if isinstance(section, Mapping):
            return section
    return settings
