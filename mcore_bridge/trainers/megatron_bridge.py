"""The interface of Megatron-Bridge for verl, RLinf and other trainers, implemented with this library."""

from __future__ import annotations

import copy
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn

from mcore_bridge.architecture import read_hf
from mcore_bridge.config.hf import find_folder
from mcore_bridge.errors import ConfigError
from mcore_bridge.factory.blueprint import BuildOptions, make_blueprint
from mcore_bridge.trainers.conversion_tasks import ConversionTask, ConversionTasks, require_tasks, sourced_weights
from mcore_bridge.trainers.loading import load_folder
from mcore_bridge.trainers.weight_export import WeightExport
from mcore_bridge.trainers.wrap import ddp_config_of, freeze_routers
from mcore_bridge.weights.files.sidecars import copy_companions
from mcore_bridge.weights.model_chunks import adapters_of, chunks_of
from mcore_bridge.weights.peft.hf_adapters import iter_peft_adapters, save_hf_adapters
from mcore_bridge.weights.save import save_hf_checkpoint
from mcore_bridge.weights.source.source import HFWeights

if TYPE_CHECKING:
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.transformer import TransformerConfig
    from transformers import PretrainedConfig

    from mcore_bridge.trainers.peft_functions import Peft
    from mcore_bridge.trainers.provider import Provider, ValueHead

__all__ = ["AutoBridge", "create_ddp_config", "freeze_moe_router", "make_value_model"]

Models = Sequence[nn.Module]
Folder = str | os.PathLike[str]

_HEAD = frozenset({"output_layer.weight", "output_layer.bias"})


def make_value_model(hidden_size: int, sequence_parallel: bool) -> ValueHead:
    """A hook for ``Provider.register_pre_wrap_hook``: the model is built with a value head.

    Args:
        hidden_size, sequence_parallel: without effect, since the model has them.
    """
    from mcore_bridge.trainers.provider import ValueHead

    return ValueHead()


def freeze_moe_router(model: Models | nn.Module) -> Models | nn.Module:
    """A hook for ``Provider.register_pre_wrap_hook``: freeze routers and the gates of shared experts."""
    freeze_routers([model] if isinstance(model, nn.Module) else model)
    return model


def create_ddp_config(
    *,
    wrap_with_ddp: bool,
    use_distributed_optimizer: bool,
    use_megatron_fsdp: bool = False,
    overrides: Mapping[str, object] | None = None,
) -> DistributedDataParallelConfig | None:
    """megatron-core's settings of data parallelism; None without it.

    Args:
        wrap_with_ddp: whether there is data parallelism.
        use_distributed_optimizer: whether to shard the optimizer's state over data parallel ranks.
        use_megatron_fsdp: refused.
        overrides: further settings, applied last.

    Raises:
        ConfigError: megatron-core has no such setting, or it is one of Megatron-FSDP.
    """
    settings = {"use_distributed_optimizer": use_distributed_optimizer, "use_megatron_fsdp": use_megatron_fsdp}
    config = ddp_config_of({**settings, **(overrides or {})})
    return config if wrap_with_ddp else None


@dataclass
class HFPretrained:
    """An HF folder, or a repository in the local hub cache.

    Attributes:
        folder: its path or name.
    """

    folder: Folder

    @cached_property
    def config(self) -> PretrainedConfig:
        """The HF config. Changes of it have no effect on a model."""
        return read_hf(self.folder)

    @property
    def name_or_path(self) -> str:
        """The path or name."""
        return os.fspath(self.folder)

    def save_artifacts(self, save_directory: Folder) -> None:
        """Copy the tokenizer, the model's code, and the config unless there is one already."""
        source, target = Path(find_folder(self.folder)), Path(save_directory)
        target.mkdir(parents=True, exist_ok=True)
        copy_companions(source, target)
        if not (target / "config.json").exists():
            shutil.copy2(source / "config.json", target)


class AutoBridge:
    """The bridge between an HF folder and models of megatron-core."""

    def __init__(self, folder: Folder, dtype: str | torch.dtype | None = None) -> None:
        self.folder = folder
        self.dtype = dtype
        self.hf_pretrained = HFPretrained(folder)
        self._sent = {"base": 0, "adapters": 0}

    @classmethod
    def from_hf_pretrained(
        cls, path: Folder, *, trust_remote_code: bool = False, dtype: str | torch.dtype | None = None
    ) -> Self:
        """Make a bridge for a folder, or for a repository in the local hub cache.

        Args:
            path: a folder with a ``config.json``.
            trust_remote_code: without effect, since no code of a repository is run.
            dtype: the dtype of models; None means bf16.

        Raises:
            ConfigError: its family is not supported; the message says why.
        """
        read_hf(path)
        return cls(path, dtype)

    @property
    def transformer_config(self) -> TransformerConfig:
        """The config of the model, without changes. A change of the result has no effect on a model."""
        provider = self.to_megatron_provider(load_weights=False)
        provider.finalize()
        return copy.deepcopy(provider)

    def to_megatron_provider(self, load_weights: bool = True, hf_path: Folder | None = None) -> Provider:
        """The config of the model. It can be changed and finalized, and then builds the model; bf16 by default.

        Args:
            load_weights: whether the model is loaded when it is built.
            hf_path: the folder to load from; None is the bridge's own folder.

        Raises:
            ConfigError: megatron-core's ``GPTModel`` cannot express the HF config.
        """
        from mcore_bridge.trainers.provider import Provider

        blueprint = make_blueprint(self.folder, BuildOptions(dtype=self.dtype or torch.bfloat16))
        source: HFWeights | None = (hf_path or self.folder) if load_weights else None
        return Provider.of(blueprint, source)

    def load_hf_weights(
        self,
        model: Models,
        hf_path: Folder | None = None,
        allowed_mismatched_params: Sequence[str] | None = None,
    ) -> Models:
        """Copy the weights of a folder into the chunks, in place.

        Args:
            model: this rank's chunks, wrapped or not.
            hf_path: the folder; None is the bridge's own folder.
            allowed_mismatched_params: parameters that the folder may lack. Only a value head is allowed, which then
                keeps its random values.

        Raises:
            ConfigError: ``allowed_mismatched_params`` has other parameters.
            CheckpointError: the folder does not fit the model, or lacks a head that it must have.
        """
        allowed = set(allowed_mismatched_params or ())
        if not allowed <= _HEAD:
            raise ConfigError(
                f"allowed_mismatched_params may only name {sorted(_HEAD)}, found {sorted(allowed - _HEAD)}"
            )
        dtype = chunks_of(model)[0].config.params_dtype
        load_folder(model, hf_path or self.folder, dtype=dtype, may_draw_head=bool(allowed))
        return model

    def get_conversion_tasks(self, megatron_model: Models, hf_path: Folder | None = None) -> ConversionTasks:
        """The tasks of an export, one for each parameter of the model. All ranks of a model replica call it together.

        The result may be kept: it refers to no tensor, and each access makes tasks with the current parameters. A task
        refers to its parameter.

        Args:
            megatron_model: this rank's chunks, wrapped or not.
            hf_path: without effect.

        Raises:
            ExportError: on every rank, if a parameter of any of them has no rule.
        """
        return ConversionTasks(megatron_model)

    def export_hf_weights(
        self,
        model: Models,
        cpu: bool = False,
        show_progress: bool = True,
        conversion_tasks: Iterable[ConversionTask | None] | None = None,
        merge_adapter_weights: bool = True,
        *,
        with_megatron_names: bool = False,
    ) -> Iterator[Any]:
        """Yield every HF tensor, whole, on every rank, like ``iter_hf_weights``. Nothing runs before the first
        ``next``.

        Args:
            model: this rank's chunks, wrapped or not.
            cpu: whether to yield tensors on the CPU.
            show_progress: without effect, as nothing is printed.
            merge_adapter_weights: for models with adapters, whether to yield merged weights. Otherwise only the base is
                yielded, with names without ``.base_layer``.
            conversion_tasks: None or the result of ``get_conversion_tasks``: everything. Some of its tasks, the same
                on all ranks: only the HF tensors of these, from the ``param_weight`` of each. Tasks with one
                ``mapping.group_key`` come together.
            with_megatron_names: whether to yield triples: the third is a tuple with the global names of the parameters
                of which the tensor was made (``SourcedWeight``).

        Raises:
            ConfigError: the tasks belong to another bridge. Or the base is exported for the second time, while the
                adapters of the model were never exported.
        """
        whole = conversion_tasks is None or isinstance(conversion_tasks, ConversionTasks)
        if isinstance(conversion_tasks, Sequence) and not whole:
            require_tasks(task for task in conversion_tasks if task is not None)
        if not merge_adapter_weights and hasattr(chunks_of(model)[0], "bridge_adapters"):
            self._sent["base"] += 1
            if self._sent["base"] > 1 and not self._sent["adapters"]:
                raise ConfigError(
                    "the rollout would get the base again, and never the adapters (verl#7495: rollouts on other "
                    "GPUs): set lora.merge=True, or change verl as "
                    "docs/trainers/verl.md shows"
                )
        options: dict[str, Any] = {"device": "cpu" if cpu else None, "merged": merge_adapter_weights}
        if whole and not with_megatron_names:
            return WeightExport(model, **options)
        weights = sourced_weights(model, conversion_tasks, **options)
        return weights if with_megatron_names else ((sourced.param_name, sourced.weight) for sourced in weights)

    def save_hf_weights(
        self,
        model: Models,
        path: Folder,
        show_progress: bool = True,
        strict: bool = True,
        merge_adapter_weights: bool = True,
        distributed_save: bool = False,
        save_every_n_ranks: int = 1,
    ) -> None:
        """Write an HF checkpoint, as ``save_hf_checkpoint``. All ranks call it, with a folder that they share.

        Args:
            model: this rank's chunks, wrapped or not.
            path: the folder. Other files in it stay, and so do its config and its tokenizer.
            show_progress, strict, distributed_save, save_every_n_ranks: without effect. All tensors are written, by
                several ranks, or this raises.
            merge_adapter_weights: for models with adapters, whether to write merged weights, or only the base.
        """
        save_hf_checkpoint(model, path, keep=True, merged=merge_adapter_weights)

    def save_hf_pretrained(
        self,
        model: Models,
        path: Folder,
        show_progress: bool = True,
        source_path: Folder | None = None,
        strict: bool = True,
        merge_adapter_weights: bool = True,
    ) -> None:
        """Write an HF checkpoint with config, tokenizer and code from the folder that the model came from.

        Args:
            model, path, merge_adapter_weights: as for ``save_hf_weights``.
            show_progress, source_path, strict: without effect.
        """
        save_hf_checkpoint(model, path, merged=merge_adapter_weights)

    def export_adapter_weights(
        self, model: Models, cpu: bool = False, show_progress: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield every tensor of the adapters in PEFT's names and order, whole, on every rank.

        Args:
            model: this rank's chunks, wrapped or not.
            cpu: whether to yield tensors on the CPU.
            show_progress: without effect.

        Raises:
            ConfigError: the model has no adapters.
        """
        adapters_of(model)
        self._sent["adapters"] += 1
        return iter_peft_adapters(model, device="cpu" if cpu else None)

    def save_hf_adapter(self, model: Models, path: Folder, peft_cls: Peft, show_progress: bool = True) -> None:
        """Write the adapters as a folder that ``peft`` loads. All ranks call it, with a folder that they share.

        Args:
            model: this rank's chunks, wrapped or not.
            path: the folder.
            peft_cls: the result of ``get_peft_cls``.
            show_progress: without effect.
        """
        save_hf_adapters(model, path)
