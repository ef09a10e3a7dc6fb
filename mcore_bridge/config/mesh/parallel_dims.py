"""The mesh: how many ways each axis of parallelism cuts a model, and where the pipeline cuts it.

A ``ParallelDims`` that exists is one that megatron-core can build for some model; ``stages`` answers for one model,
``dp`` and ``edp`` for one world size. All of that is pure: only ``initialize`` and ``from_mcore`` touch processes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from datetime import timedelta
from math import lcm, prod

from mcore_bridge.config.mesh import process_groups
from mcore_bridge.config.mesh.pipeline import BALANCED, PipelineSplit, Stage, describe_stages, parse_layout, stages_of
from mcore_bridge.config.overrides import DIM_OF
from mcore_bridge.errors import MeshError

_SIZES = ("tp", "pp", "vp", "cp", "ep", "etp")
_SPLIT = tuple(field.name for field in fields(PipelineSplit))


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelDims:
    """Sizes of the mesh and the split of the pipeline.

    Attributes:
        tp: tensor parallel size.
        pp: pipeline parallel size.
        vp: chunks of the model on each pipeline rank (virtual pipeline stages).
        cp: context parallel size.
        ep: expert parallel size.
        etp: tensor parallel size of the experts. Not tied to ``tp``: 1 unless given.
        sp: sequence parallelism, which needs ``tp > 1``.
        hierarchical_context_parallel_sizes: what ``cp_comm_type="a2a+p2p"`` needs: of so many neighbours (on one node,
            say) each has some of the heads, and so many of these form a ring. Their product is ``cp``.
        layout: megatron-core's explicit pipeline layout, such as ``"Ett|t*3|(t|)*2L"``, or ``"balanced"``: the one
            that ``balanced()`` (and ``build_model``) chooses by bytes.
        num_layers_in_first_pipeline_stage: layers of pipeline rank 0, over all its chunks; the others share the rest.
        num_layers_in_last_pipeline_stage: the same for the last pipeline rank.
        account_for_embedding_in_pipeline_split: the embedding counts as one layer of the first stage.
        account_for_loss_in_pipeline_split: the loss counts as one layer of the last stage.

    Raises:
        MeshError: for a combination that no model and no world size can make right.
    """

    tp: int = 1
    pp: int = 1
    vp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1
    sp: bool = False
    hierarchical_context_parallel_sizes: tuple[int, int] | None = None
    layout: str | None = None
    num_layers_in_first_pipeline_stage: int | None = None
    num_layers_in_last_pipeline_stage: int | None = None
    account_for_embedding_in_pipeline_split: bool = False
    account_for_loss_in_pipeline_split: bool = False

    def __post_init__(self) -> None:
        for name in _SIZES:
            size = getattr(self, name)
            if type(size) is not int or size < 1:
                raise MeshError(f"{name} must be an integer of at least 1, found {size!r}")
        if self.sp and self.tp == 1:
            raise MeshError("sp=True needs tp > 1: sequence parallelism cuts activations over the tp axis, found tp=1")
        if self.vp > 1 and self.pp == 1:
            raise MeshError(f"vp={self.vp} needs pp > 1: virtual stages interleave pipeline ranks, found pp=1")
        self._check_hierarchy()
        self._split()

    def _check_hierarchy(self) -> None:
        if self.hierarchical_context_parallel_sizes is None:
            return
        sizes = tuple(self.hierarchical_context_parallel_sizes)  # of a trainer's settings, which have lists
        if len(sizes) != 2 or any(type(size) is not int or size < 1 for size in sizes) or prod(sizes) != self.cp:
            raise MeshError(f"hierarchical_context_parallel_sizes must be two whose product is cp={self.cp}: {sizes}")
        object.__setattr__(self, "hierarchical_context_parallel_sizes", sizes)

    def _split(self) -> PipelineSplit:
        return PipelineSplit(**{name: getattr(self, name) for name in _SPLIT})

    def __str__(self) -> str:
        names = [f"{name.upper()}{getattr(self, name)}" for name in _SIZES if getattr(self, name) > 1]
        if self.hierarchical_context_parallel_sizes:
            names.append("HCP{}x{}".format(*self.hierarchical_context_parallel_sizes))
        return " ".join([*names, *(["SP"] if self.sp else [])]) or "TP1"

    @property
    def model_size(self) -> int:
        """Ranks of one replica: ``tp * cp * pp``."""
        return self.tp * self.cp * self.pp

    @property
    def smallest_world(self) -> int:
        """The fewest ranks that these sizes fit, those of the experts included."""
        return lcm(self.model_size, self.etp * self.ep * self.pp)

    def dp(self, world_size: int) -> int:
        """Data parallel size in a world of ``world_size`` ranks. Raises ``MeshError`` unless it divides."""
        return _quotient(world_size, {"tp": self.tp, "cp": self.cp, "pp": self.pp})

    def edp(self, world_size: int) -> int:
        """Data parallel size of the experts. Raises ``MeshError`` unless ``etp * ep * pp`` divides the world."""
        return _quotient(world_size, {"etp": self.etp, "ep": self.ep, "pp": self.pp})

    def stages(self, num_layers: int) -> tuple[Stage, ...]:
        """What every pipeline rank and virtual stage holds of a model of ``num_layers`` decoder layers.

        Returns:
            The stages in execution order: the one of ``pp_rank`` and ``vp_stage`` is at ``vp_stage * pp + pp_rank``.

        Raises:
            MeshError: these layers cannot be split so, or ``layout="balanced"`` was not resolved by ``balanced()``.
        """
        return stages_of(self._split(), num_layers)

    def without_mtp(self) -> ParallelDims:
        """The same mesh for a model whose MTP layers are not built: an explicit layout places none."""
        if self.layout in (None, BALANCED):
            return self
        return replace(self, layout="|".join(stage.replace("m", "") for stage in parse_layout(self.layout)))

    def describe(self, *, world_size: int, num_layers: int) -> str:
        """One line for a log: ``TP2 PP2 VP2 SP, DP1, 4 ranks; layers per stage: E2|2|2|2L``."""
        experts = f" EDP{self.edp(world_size)}" if self.ep > 1 or self.etp > 1 else ""
        stages = describe_stages(self.stages(num_layers))
        return f"{self}, DP{self.dp(world_size)}{experts}, {world_size} ranks; layers per stage: {stages}"

    def to_group_sizes(self) -> dict[str, int | list[int] | None]:
        """The mesh as ``parallel_state.initialize_model_parallel`` takes it, and ``TransformerConfig`` too."""
        hierarchy = self.hierarchical_context_parallel_sizes
        return {
            "tensor_model_parallel_size": self.tp,
            "pipeline_model_parallel_size": self.pp,
            "virtual_pipeline_model_parallel_size": self.vp if self.vp > 1 else None,
            "context_parallel_size": self.cp,
            "expert_model_parallel_size": self.ep,
            "expert_tensor_parallel_size": self.etp,  # None would mean tp
            "hierarchical_context_parallel_sizes": [*hierarchy] if hierarchy else None,
        }

    def to_config_fields(self) -> dict[str, object]:
        """The ``TransformerConfig`` fields that the mesh decides; an unresolved ``"balanced"`` raises ``MeshError``."""
        if self.layout == BALANCED:
            raise MeshError(
                'layout="balanced" must become an explicit layout first: call balanced() (build_model does)'
            )
        return {
            **self.to_group_sizes(),
            "sequence_parallel": self.sp,
            "pipeline_model_parallel_layout": self.layout,
            "num_layers_in_first_pipeline_stage": self.num_layers_in_first_pipeline_stage,
            "num_layers_in_last_pipeline_stage": self.num_layers_in_last_pipeline_stage,
            "account_for_embedding_in_pipeline_split": self.account_for_embedding_in_pipeline_split,
            "account_for_loss_in_pipeline_split": self.account_for_loss_in_pipeline_split,
        }

    def with_config_fields(self, settings: Mapping[str, object]) -> ParallelDims:
        """These dims with what ``settings`` have of ``to_config_fields``; None for a size means what mcore means by it.

        Raises:
            MeshError: for a combination that no model and no world size can make right.
        """
        found = {DIM_OF.get(name, name): settings[name] for name in self.to_config_fields() if name in settings}
        for name in _SIZES:
            if name in found and found[name] is None:
                found[name] = found.get("tp", self.tp) if name == "etp" else 1
        return replace(self, **found)  # type: ignore[arg-type]  # __post_init__ looks at them

    @classmethod
    def from_mcore(cls, *, sp: bool = False, layout: str | None = None) -> ParallelDims:
        """The mesh that a trainer made with ``megatron.core.parallel_state``.

        Args:
            sp: ``parallel_state`` knows no sequence parallelism; it changes activations, and no weight.
            layout: nor the split of the pipeline. For another than even or explicit, ``dataclasses.replace`` fields.

        Raises:
            MeshError: ``parallel_state`` is not initialized, or has an axis that we do not have.
        """
        return cls(**process_groups.read_sizes(), sp=sp, layout=layout)  # type: ignore[arg-type]  # by name

    def initialize(self, *, device: str | None = None, seed: int = 1234, timeout: timedelta | None = None) -> None:
        """Join torch.distributed and make megatron-core's groups, in its default order (tp-cp-ep-dp-pp).

        A process group that exists is kept; otherwise torchrun's environment says who we are, and without it this
        process is the only one. Does nothing where ``parallel_state`` has these sizes already. Where it joins,
        the process waits at its end until gloo's threads are at rest: some milliseconds. Groups are left to the caller.

        Args:
            device: "cpu" (gloo, and ``enable_cpu()``), "cuda" (nccl, on the GPU of LOCAL_RANK); None: a GPU if any.
            seed: of megatron-core's random states on GPUs, where it cannot initialise weights without them.
            timeout: how long a collective waits for a rank that does not come before it raises, in every group that is
                made here; one that exists keeps its own. None is torch's and megatron-core's: 30 minutes, 10 for NCCL's
                own group of all ranks.

        Raises:
            MeshError: the sizes do not fit the world, or ``parallel_state`` has others; before any group is made.
        """
        process_groups.require_timeout(timeout)
        device = process_groups.choose_device(device)
        process_groups.require_same(
            {name: getattr(self, name) for name in (*_SIZES, "hierarchical_context_parallel_sizes")}
        )
        world_size = process_groups.world_size()
        self.dp(world_size)
        self.edp(world_size)
        process_groups.initialize(self.to_group_sizes(), device=device, seed=seed, timeout=timeout)


def _quotient(world_size: int, factors: Mapping[str, int]) -> int:
    size = 1
    for factor in factors.values():
        size *= factor
    if world_size < 1 or world_size % size:
        product = " * ".join(f"{name}={factor}" for name, factor in factors.items())
        raise MeshError(
            f"{world_size} ranks are not a multiple of {product} = {size}: change the sizes or start {size} ranks"
        )
    return world_size // size
