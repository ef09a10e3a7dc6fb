"""The mesh: the size of each axis of parallelism, and the split of the pipeline.

megatron-core can build some model on every valid ``ParallelDims``. ``stages`` checks a mesh for one model, ``dp`` and
``edp`` check it for one world size. Only ``initialize`` and ``from_mcore`` use process groups.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from datetime import timedelta
from math import lcm, prod

from mcore_bridge.arguments import is_count
from mcore_bridge.config.mesh import process_groups
from mcore_bridge.config.mesh.pipeline import (
    BALANCED,
    PipelineSplit,
    Stage,
    describe_stages,
    layout_text,
    parse_layout,
    stages_of,
)
from mcore_bridge.config.mesh.spellings import sizes_in
from mcore_bridge.errors import MeshError

DIM_OF = {
    "tensor_model_parallel_size": "tp",
    "pipeline_model_parallel_size": "pp",
    "virtual_pipeline_model_parallel_size": "vp",
    "context_parallel_size": "cp",
    "expert_model_parallel_size": "ep",
    "expert_tensor_parallel_size": "etp",
    "sequence_parallel": "sp",
    "pipeline_model_parallel_layout": "layout",
}
"""Fields of ``TransformerConfig`` that the mesh decides, with their names in ``ParallelDims``."""
_SIZES = ("tp", "pp", "vp", "cp", "ep", "etp")
_FLAGS = ("sp", "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")
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
        hierarchical_context_parallel_sizes: two sizes, for ``cp_comm_type="a2a+p2p"``. Groups of the first size, such
            as the ranks of a node, distribute heads. The second size is the number of such groups, which form a ring.
            Their product is ``cp``.
        layout: megatron-core's explicit pipeline layout, such as ``"Ett|t*3|(t|)*2L"``; or ``"balanced"``, for the one
            that ``balanced()`` (and ``build_model``) chooses by bytes. megatron-core's other spellings become text:
            ``[["embedding", "decoder"], ["decoder", "loss"]]``, and the object in its config.
        num_layers_in_first_pipeline_stage: layers of pipeline rank 0, over all its chunks; the other ranks share the
            remaining layers.
        num_layers_in_last_pipeline_stage: the layers of the last pipeline rank.
        account_for_embedding_in_pipeline_split: the embedding counts as one layer of the first stage.
        account_for_loss_in_pipeline_split: the loss counts as one layer of the last stage.

    Raises:
        MeshError: the combination is wrong for every model and every world size.

    Example:
        >>> dims = mb.ParallelDims(tp=2, pp=2, sp=True)   # then dims.initialize(), on each rank that torchrun starts
        >>> dims.model_size, dims.dp(world_size=16)
        (4, 4)
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
            if not is_count(size):
                raise MeshError(f"{name} must be an integer of at least 1, found {size!r}: pass an int such as 1")
        for name in _FLAGS:
            if (flag := getattr(self, name)) not in (False, True):
                raise MeshError(f"{name} must be True or False, found {flag!r}: pass one of the two")
            object.__setattr__(self, name, bool(flag))  # settings of a command line have 0 or 1
        object.__setattr__(self, "layout", layout_text(self.layout))
        if self.sp and self.tp == 1:
            raise MeshError(
                "sp=True needs tp > 1: sequence parallelism cuts activations over the tp axis, found tp=1. Set both, "
                "or neither"
            )
        if self.vp > 1 and self.pp == 1:
            raise MeshError(
                f"vp={self.vp} needs pp > 1: virtual stages interleave pipeline ranks, found pp=1. Set both, or neither"
            )
        self._check_hierarchy()
        self._split()

    def _check_hierarchy(self) -> None:
        given: object = self.hierarchical_context_parallel_sizes
        if given is None:
            return
        sizes = tuple(given) if isinstance(given, Sequence) else ()  # a trainer's settings may have a list
        if len(sizes) != 2 or not all(map(is_count, sizes)) or prod(sizes) != self.cp:
            raise MeshError(
                f"hierarchical_context_parallel_sizes must be two sizes whose product is cp={self.cp}, found {given}: "
                "correct them, or cp"
            )
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
        """The number of ranks of one replica, ``tp * cp * pp``."""
        return self.tp * self.cp * self.pp

    @property
    def smallest_world(self) -> int:
        """The least number of ranks for these sizes, including the sizes of experts."""
        return lcm(self.model_size, self.etp * self.ep * self.pp)

    def dp(self, world_size: int) -> int:
        """Data parallel size in a world of ``world_size`` ranks. Raises ``MeshError`` unless it divides."""
        return _quotient(world_size, {"tp": self.tp, "cp": self.cp, "pp": self.pp})

    def edp(self, world_size: int) -> int:
        """Data parallel size of the experts. Raises ``MeshError`` unless ``etp * ep * pp`` divides the world."""
        return _quotient(world_size, {"etp": self.etp, "ep": self.ep, "pp": self.pp})

    def stages(self, num_layers: int) -> tuple[Stage, ...]:
        """The pipeline stages of a model with ``num_layers`` decoder layers.

        Returns:
            The stages in execution order. The stage of ``pp_rank`` and ``vp_stage`` has the index ``vp_stage * pp +
            pp_rank``.

        Raises:
            MeshError: the layers cannot be split in this way, or ``layout="balanced"`` was not resolved by
                ``balanced()``.
        """
        return stages_of(self._split(), num_layers)

    def without_mtp(self) -> ParallelDims:
        """This mesh for a model without MTP layers: they are removed from an explicit layout."""
        if self.layout in (None, BALANCED):
            return self
        return replace(self, layout="|".join(stage.replace("m", "") for stage in parse_layout(self.layout)))

    def describe(self, *, world_size: int, num_layers: int) -> str:
        """One line for a log: ``TP2 PP2 VP2 SP, DP1, 4 ranks; layers per stage: E2|2|2|2L``."""
        experts = f" EDP{self.edp(world_size)}" if self.ep > 1 or self.etp > 1 else ""
        stages = describe_stages(self.stages(num_layers))
        return f"{self}, DP{self.dp(world_size)}{experts}, {world_size} ranks; layers per stage: {stages}"

    def to_group_sizes(self) -> dict[str, int | list[int] | None]:
        """The sizes as arguments of ``parallel_state.initialize_model_parallel`` and of ``TransformerConfig``."""
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
        """The ``TransformerConfig`` fields that the mesh decides.

        Raises:
            MeshError: the layout is still ``"balanced"``.
        """
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
        """A copy, changed by those ``settings`` that are names of ``to_config_fields``.

        The value None has the meaning that it has in megatron-core.

        Raises:
            MeshError: the combination is wrong for every model and every world size.
        """
        changes = {DIM_OF.get(name, name): settings[name] for name in self.to_config_fields() if name in settings}
        for name in _SIZES:
            if name in changes and changes[name] is None:
                changes[name] = changes.get("tp", self.tp) if name == "etp" else 1
        changes |= {name: False for name in _FLAGS if changes.get(name, False) is None}
        return replace(self, **changes)  # type: ignore[arg-type]  # __post_init__ checks them

    @classmethod
    def from_dict(cls, settings: Mapping[str, object]) -> ParallelDims:
        """The mesh in settings of a trainer, such as the YAML of verl or NeMo-RL, or ``vars(args)`` of slime.

        Args:
            settings: a mapping of names to sizes, by the names of this class or of megatron-core. It may be the whole
                settings of verl or NeMo-RL. Other keys do not matter. With names of megatron-core, defaults are
                megatron-core's, too: without a size, experts have that of ``tp``.

        Returns:
            The mesh. Sizes without a setting are 1.

        Raises:
            MeshError: the settings have no size of a mesh, or have one twice or misspelt; or the combination is wrong.

        Example:
            >>> mb.ParallelDims.from_dict({"tensor_model_parallel_size": 2, "sequence_parallel": True, "lr": 1e-6})
            ParallelDims(tp=2, pp=1, vp=1, cp=1, ep=1, etp=2, sp=True, ...)
        """
        return cls().with_config_fields(sizes_in(settings, ours=DIM_OF, names=cls().to_config_fields().keys()))

    @classmethod
    def from_mcore(cls, *, sp: bool = False, layout: str | None = None) -> ParallelDims:
        """The mesh that a trainer made with ``megatron.core.parallel_state``.

        Args:
            sp: whether sequence parallelism is on. ``parallel_state`` does not have it, since it cuts no weights.
            layout: the explicit layout of the pipeline, which ``parallel_state`` does not have either. None: an even
                split. For another split, set fields with ``dataclasses.replace``.

        Returns:
            The sizes of its groups, with ``sp`` and ``layout``.

        Raises:
            MeshError: ``parallel_state`` is not initialized, or has an axis that we do not have.
        """
        return cls(**process_groups.read_sizes(), sp=sp, layout=layout)  # type: ignore[arg-type]  # by name

    def initialize(self, *, device: str | None = None, seed: int = 1234, timeout: timedelta | None = None) -> None:
        """Join torch.distributed, and make megatron-core's groups in its default order (tp-cp-ep-dp-pp).

        An existing process group is kept. If there is none, rank and world size come from the environment of torchrun.
        Without this environment, this process is the only rank. If ``parallel_state`` already has these sizes, nothing
        happens.

        A process that joined here waits some milliseconds at its end, until gloo's threads are idle. The caller has to
        destroy the groups.

        Args:
            device: "cpu" (gloo, with ``enable_cpu()``) or "cuda" (nccl, on the GPU of LOCAL_RANK). None: "cuda" if
                there is a GPU.
            seed: the seed of megatron-core's random states on GPUs, which it needs to initialise weights.
            timeout: how long a collective of the new groups waits for a missing rank before it raises. None: the
                defaults of torch and megatron-core, which are 30 minutes, and 10 for NCCL's group of all ranks.

        Raises:
            MeshError: the sizes do not fit the world, ``parallel_state`` has other sizes, or ranks have different dims.
                No group is made then.
        """

        def check() -> tuple[str, dict[str, object]]:
            process_groups.require_timeout(timeout)
            chosen = process_groups.choose_device(device)
            process_groups.require_same(
                {name: getattr(self, name) for name in (*_SIZES, "hierarchical_context_parallel_sizes")}
            )
            world_size = process_groups.world_size()
            self.dp(world_size)
            self.edp(world_size)
            return chosen, {"dims": self, "device": chosen, "seed": seed}

        process_groups.initialize(check, self.to_group_sizes(), seed=seed, timeout=timeout)


def _quotient(world_size: int, factors: Mapping[str, int]) -> int:
    size = 1
    for factor in factors.values():
        size *= factor
    if world_size < 1 or world_size % size:
        product = " * ".join(f"{name}={factor}" for name, factor in factors.items())
        raise MeshError(
            f"{world_size} ranks are not a multiple of {product} = {size}: change the sizes, or choose a multiple of "
            f"{size} ranks",
            in_python=f"torchrun --nproc-per-node {size} starts {size} ranks",
        )
    return world_size // size
