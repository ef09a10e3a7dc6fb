"""RLinf's ``model_provider_func`` for Megatron's ``setup_model_and_optimizer``, which builds one chunk at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from mcore_bridge.errors import ConfigError
from mcore_bridge.trainers.provider import build_one, stage_of
from mcore_bridge.trainers.rlinf.actor import read_actor
from mcore_bridge.trainers.rlinf.checkpoint import checkpoint_of, hf_folder_of, require_loads
from mcore_bridge.weights.provenance import HF
from mcore_bridge.weights.source.source import HFWeights

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel


def model_provider(
    actor: Mapping[str, Any],
    *,
    hf: HF | None = None,
    overrides: Mapping[str, object] | None = None,
    load_weights: bool | HFWeights | None = None,
    device: Any = None,
    seed: int = 0,
    model: str = "gpt",
) -> Callable[..., GPTModel]:
    """Make the function that builds the chunks of one model, from an ``actor`` or a ``critic`` block.

    Args:
        actor, hf, overrides: as for ``read_actor``. With ``use_critic_model`` the model has a value head.
        load_weights: True loads the HF folder, a source is loaded itself, and False keeps random values. With None the
            block decides. With ``megatron_checkpoint`` or ``use_hf_ckpt``, Megatron loads a checkpoint after the model
            is built, and we check that it will load all of it. Otherwise the HF folder is loaded.
        device, seed, model: as for ``build_model``.

    Returns:
        ``model_provider_func(pre_process, post_process, config=None, vp_stage=None, pg_collection=None, **_)``. It
        ignores ``config`` and ``pg_collection``, and uses the block and ``parallel_state``. Without ``vp_stage`` it
        builds the current stage of ``parallel_state``.

    Raises:
        ConfigError: as ``read_actor``; or Megatron would load a checkpoint over the weights that are loaded here.
        CheckpointError: from the function, when Megatron would not load all of the chunk from its checkpoint.
        MeshError: from the function, when ``parallel_state`` or the stage does not fit the block.
    """
    if hf is None and load_weights is True:  # a converted checkpoint also has an HF config, and no HF weights
        hf = hf_folder_of(actor)
    read = read_actor(actor, hf=hf, overrides=overrides)
    head = "value" if actor.get("use_critic_model") else "lm"
    checkpoint = checkpoint_of(actor) if load_weights is None else None
    source: HFWeights | None = None
    if load_weights is not False and checkpoint is None:
        source = read.hf if load_weights is None or load_weights is True else load_weights
        _require_last(actor)

    make_once = cache(partial(read.blueprint, head=head, device=device, model=model))

    def model_provider_func(
        pre_process: bool = True,
        post_process: bool = True,
        config: object = None,
        vp_stage: int | None = None,
        pg_collection: object = None,
        **_: object,
    ) -> GPTModel:
        read.dims.initialize()  # does nothing if parallel_state has these sizes, and raises if it has other sizes
        blueprint = make_once()
        chunk = build_one(blueprint, source, vp_stage, pre_process=pre_process, post_process=post_process, seed=seed)
        if checkpoint is not None:
            require_loads(chunk, checkpoint, read.dims, stage_of(blueprint, vp_stage).vp_stage, head=head)
        return chunk

    return model_provider_func


def _require_last(actor: Mapping[str, Any]) -> None:
    """Raise if Megatron would overwrite the weights that are loaded here."""
    load = (actor.get("megatron") or {}).get("load")
    if load is not None:
        raise ConfigError(
            f"megatron.load must be None if weights are loaded from elsewhere, found {load!r}, which Megatron would "
            "load over them: set it to None, or leave out load_weights"
        )
