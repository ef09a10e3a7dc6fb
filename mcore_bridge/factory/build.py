"""``build_model``. All checks come before anything is built.

Each chunk is constructed exactly once, in the order of the virtual stages, and is returned, since some trainers hook
into constructors.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from mcore_bridge.arguments import DEVICE, FUNCTION, WHOLE, require
from mcore_bridge.config.mesh.alike import Shared, agreed
from mcore_bridge.config.mesh.parallel_dims import ParallelDims
from mcore_bridge.config.mesh.pipeline import Stage
from mcore_bridge.config.mesh.process_groups import building_groups, differing
from mcore_bridge.config.unread_fields import notes_on
from mcore_bridge.errors import CheckpointError, ConfigError, MeshError
from mcore_bridge.factory.blueprint import Blueprint, BuildOptions, Overrides, make_blueprint, reconcile
from mcore_bridge.factory.chunk import build_chunk, building
from mcore_bridge.factory.freeze import freeze_parameters, require_patterns
from mcore_bridge.rules.dtypes import DtypeLike
from mcore_bridge.weights.load import described_source, load_hf_weights
from mcore_bridge.weights.provenance import identity
from mcore_bridge.weights.source.source import HFWeights

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel
    from transformers import PretrainedConfig

logger = logging.getLogger("mcore_bridge")


def build_model(
    hf: str | os.PathLike[str] | PretrainedConfig,
    *,
    dims: ParallelDims | None = None,
    dtype: DtypeLike = torch.bfloat16,
    device: torch.device | str | None = None,
    backend: str = "auto",
    head: str = "lm",
    overrides: Overrides | None = None,
    load_weights: bool | HFWeights = True,
    freeze: Sequence[str] = (),
    on_chunk: Callable[[GPTModel, int], None] | None = None,
    seed: int = 0,
    strict_config: bool = False,
    vision: str = "text_only",
    model: str = "gpt",
) -> list[GPTModel]:
    """Build this rank's part of an HF model: bare ``GPTModel``s of megatron-core, one per virtual pipeline stage.

    All ranks of a model replica call it together, and compare their arguments first.

    Args:
        hf: a folder, the name of a repository in the local hub cache, or a config.
        dims: the mesh; ``parallel_state`` must have equal sizes. None: read it from ``parallel_state``, without
            sequence parallelism.
        dtype: of all parameters, norms included: float32, bfloat16 or float16, or its name. "auto": the dtype in the
            HF config, or else bfloat16. Weights are cast to it.
        device: of the parameters; "meta" gives a model without storage. None: the CUDA device of this process, or CPU.
        backend: "te" (TransformerEngine), "torch" (runs anywhere), or "auto": "te" if it is installed, on CUDA.
        head: "lm", "value" (one fp32 number per token), "classification" (``hf.num_labels`` fp32 numbers),
            "process_reward" or "none" (hidden states after the final norm, for embedding models). "process_reward" is
            the head of Qwen's process reward models: ``hf.num_labels`` numbers, by two linear layers and a relu.
        overrides: ``TransformerConfig`` fields and ``GPTModel`` arguments by name, applied last. If the HF config
            decides such a value, the HF config changes too, also in saved folders. If no HF config can express the
            value, this raises.
        load_weights: True: from the folder ``hf``. A folder, mapping or iterable of pairs: from there. False: no
            weights; parameters have megatron-core's initial values, drawn from ``seed``.
        freeze: ``fnmatch`` patterns of canonical parameter names, such as "embedding.*". A pattern after "!" makes
            parameters trainable again; the last match decides. All ranks must pass equal patterns: together they find
            out whether each pattern matches a parameter on some stage.
        on_chunk: called at the end with each chunk and its virtual stage: loaded, frozen and not yet wrapped.
        seed: for all random values: the initial values, or the values of a head that the source lacks.
        strict_config: True: refuse fields of the HF config that the architecture does not claim. False: accept and log
            them, if no code of transformers reads them for this family.
        vision: the fate of a composite's models of images, video and sound. "text_only": they are not built, batches
            are of text, exports yield the text, and ``save_hf_checkpoint`` copies their tensors. "train": the first
            stage has transformers' model of images as ``chunk.vision``, whole on each tensor-parallel rank, and
            exports, saves and checkpoints have its tensors. "frozen": like "train", with ``requires_grad=False``;
            to train one part of the tower, such as its connection to the text, add
            ``freeze=["!vision.visual.merger.*"]``. "train" and "frozen" need transformers 5.17. Models of sound are
            never built.
        model: the class of the chunks. "gpt": megatron-core's ``GPTModel``. "hybrid": its ``HybridModel``, whose layers
            are halves of a ``GPTModel``'s (megatron-core 0.19, and families whose layers of one kind are equal).

    Returns:
        The chunks by virtual stage. ``chunk.bridge`` holds the provenance: HF config, folder and head.

    Raises:
        ConfigError: the config, an override, the backend or the head cannot be built exactly. Or ranks of a replica
            pass different arguments; then all of them raise.
        MeshError: ``dims`` do not fit this model, or differ from ``parallel_state``.
        CheckpointError: the weights do not fit the model.

    Example:
        >>> models = mb.build_model("path/of/Qwen3-8B", dims=mb.ParallelDims(), dtype=torch.bfloat16)
        >>> [type(model).__name__ for model in models]    # one for each virtual stage
        ['GPTModel']
    """

    def prepare() -> tuple[Blueprint, HFWeights | None]:
        require(
            ConfigError,
            device=(device, DEVICE.or_none()),
            seed=(seed, WHOLE),
            on_chunk=(on_chunk, FUNCTION.or_none()),
        )
        options = BuildOptions(
            dims=dims or _mesh(),
            dtype=dtype,
            device=device,
            backend=backend,
            head=head,
            overrides=overrides,
            strict_config=strict_config,
            vision=vision,
            model=model,
        )
        blueprint = make_blueprint(hf, options)
        return blueprint, _source(hf, load_weights, blueprint.device)

    chunks = build(prepare, freeze=freeze, seed=seed)
    for index, chunk in enumerate(chunks):
        if on_chunk is not None:
            on_chunk(chunk, index)
    return chunks


def build(
    prepare: Callable[[], tuple[Blueprint, HFWeights | None]],
    *,
    freeze: Sequence[str] = (),
    seed: int = 0,
    further: Shared | None = None,
) -> list[GPTModel]:
    """Builds this rank's chunks from a blueprint. They share its config object.

    All ranks of a replica, and all ranks that share experts, first compare the arguments of the build. If one rank
    cannot load its weights, all raise.

    Args:
        prepare: makes the blueprint. Later changes of its config are checked like overrides. The second value is the
            source of the weights; None: parameters have megatron-core's initial values.
        freeze, seed: see ``build_model``, as for the errors.
        further: more values that must be equal on all ranks.
    """

    def checked() -> tuple[tuple[Blueprint, HFWeights | None, object], Shared]:
        require_patterns(freeze)
        blueprint, source = prepare()
        blueprint = reconcile(blueprint)
        _require_mesh(blueprint, _mesh())
        shared = {**_shared(blueprint, source), "freeze": [*freeze], "seed": seed, **(further or {})}
        return (blueprint, source, shared["load_weights"]), shared

    blueprint, source, described = agreed(building_groups(), checked, ConfigError)
    stages = own_stages(blueprint)
    with building(blueprint, seed=seed, initialise=source is None):
        chunks = [build_chunk(blueprint, stage, seed=seed) for stage in stages]
    freeze_parameters(chunks, freeze)
    if source is not None:
        agreed(building_groups(), partial(_load, chunks, source, described, blueprint.dtype), CheckpointError)
    _log(blueprint, chunks)
    return chunks


def _load(chunks: Sequence[GPTModel], source: HFWeights, described: object, dtype: torch.dtype) -> tuple[None, Shared]:
    """Load weights. Raise if the source has changed since ranks compared it, because each rank opens it by itself."""
    load_hf_weights(chunks, source, dtype=dtype)
    if (now := described_source(source)) != described:
        raise CheckpointError(
            f"the weights were changed while they were read, from {described} to {now}: wait for the process that "
            "writes there, and build again"
        )
    return None, {}


def _shared(blueprint: Blueprint, source: HFWeights | None) -> Shared:
    """The values of a blueprint that must be equal on ranks, by the names of arguments of ``build_model``."""
    return {
        "hf": identity(replace(blueprint.provenance, hf=blueprint.origin)),
        "dims": blueprint.dims,
        "dtype": blueprint.dtype,
        "backend": blueprint.backend,
        "head": blueprint.provenance.head,
        "overrides": sorted(blueprint.overrides.items()),
        "load_weights": described_source(source),
        "vision": blueprint.provenance.vision,
        "model": blueprint.options.model,
    }


def _mesh() -> ParallelDims:
    """The mesh of this process."""
    from megatron.core import parallel_state

    if not parallel_state.model_parallel_is_initialized():
        raise MeshError(
            "build_model needs megatron-core's process groups, found none: call ParallelDims(...).initialize() first, "
            "or megatron's initialize_model_parallel"
        )
    return ParallelDims.from_mcore()


def _require_mesh(blueprint: Blueprint, mesh: ParallelDims) -> None:
    """Raises ``MeshError`` if the model is cut for other groups than this process has.

    Sizes of expert parallelism matter only if the model has experts.
    """
    experts = ("ep", "etp") if blueprint.config.num_moe_experts else ()
    names = ("tp", "pp", "vp", "cp", "hierarchical_context_parallel_sizes", *experts)
    if differ := differing(*({name: getattr(dims, name) for name in names} for dims in (blueprint.dims, mesh))):
        raise MeshError(
            f"dims must be the mesh of parallel_state, found other sizes, as (parallel_state, dims): {differ}. Pass "
            "ParallelDims.from_mcore(), or initialise parallel_state with dims"
        )


def _source(
    hf: str | os.PathLike[str] | PretrainedConfig, load_weights: bool | HFWeights, device: torch.device
) -> HFWeights | None:
    if load_weights is False:
        return None
    if device.type == "meta":
        raise ConfigError("a model on the meta device has no storage to load into; pass load_weights=False")
    if load_weights is None:
        raise ConfigError("load_weights must be True, False, a folder or a mapping of tensors, found None: pass one")
    if load_weights is not True:
        return load_weights
    if not isinstance(hf, str | os.PathLike):
        raise ConfigError(
            "load_weights=True needs the folder of the weights, but hf is a config; pass load_weights=FOLDER, a "
            "mapping of tensors, or False"
        )
    return hf


def own_stages(blueprint: Blueprint) -> list[Stage]:
    """The stages of this rank, in the order of virtual stages."""
    from megatron.core import parallel_state

    rank = parallel_state.get_pipeline_model_parallel_rank()
    return [stage for stage in blueprint.stages if stage.pp_rank == rank]


def _log(blueprint: Blueprint, chunks: Sequence[GPTModel]) -> None:
    """Log one line on rank 0, and the ignored fields of the HF config."""
    if torch.distributed.get_rank() != 0:
        return
    for level, note in notes_on(blueprint.unread):
        logger.log(level, note)
    if not logger.isEnabledFor(logging.INFO):
        return
    try:
        total = f"{blueprint.counts.total:,}"
    except ConfigError:  # the config may be valid only with its overrides
        total = "an unknown number of"
    here = sum(parameter.numel() for chunk in chunks for parameter in chunk.parameters())
    world_size = torch.distributed.get_world_size()
    logger.info(
        "built %s: %s parameters, %s on this rank; %s; %s",
        *(blueprint.hf.model_type, total, f"{here:,}", blueprint),
        blueprint.dims.describe(world_size=world_size, num_layers=blueprint.config.num_layers),
    )
