"""Reads the settings of RLinf's offline convertor, from RLinf's config block or from a ``ConvertorConfig``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mcore_bridge.config.mesh.parallel_dims import ParallelDims
from mcore_bridge.convert.rank_files.file_layout import Style
from mcore_bridge.errors import ConfigError
from mcore_bridge.weights.dist_checkpoint.extra_state import EXTRA_STATES, ExtraState

_ASKED = {
    "tensor_model_parallel_size": "tp_size",
    "pipeline_model_parallel_size": "pp_size",
    "expert_model_parallel_size": "ep_size",
    "expert_tensor_parallel_size": "tpe_size",
    "save_path": "save_path",
    "grouped_gemm": "grouped_gemm",
    "pp_stages": "pp_stages",
    "te_ln_linear_qkv": "te_ln_linear_qkv",
    "te_ln_linear_mlp_fc1": "te_ln_linear_mlp_fc1",
    "te_ln_add_extra_state": "te_ln_add_extra_state",
}
_UNUSED = ("model", "model_type", "hf_model_path", "use_gpu_num", "use_gpu_index", "process_num", "num_hidden_layers")
"""Keys without effect: the HF config describes the model, and one thread of the CPU is as fast as the disk."""


@dataclass(frozen=True, kw_only=True)
class ConvertorSettings:
    """The settings of one conversion: the attributes of RLinf's ``ConvertorConfig`` that affect the result.

    Attributes:
        load_path: the folder to read: HF for the first stage and for both at once, middle files for the second.
        save_path: the folder to write.
        tp_size, pp_size, ep_size, tpe_size: the mesh; ``tpe_size`` is the tensor parallelism of experts.
        pp_stages: layers of each pipeline stage; None divides them evenly.
        grouped_gemm: "te" for experts in one grouped module, None for experts one by one.
        te_ln_linear_qkv, te_ln_linear_mlp_fc1: whether norms are fused with the following linear layers.
        te_ln_add_extra_state: the value of the extra state of TransformerEngine's modules; None omits it.
    """

    load_path: str
    save_path: str
    tp_size: int = 1
    pp_size: int = 1
    ep_size: int = 1
    tpe_size: int = 1
    pp_stages: tuple[int, ...] | None = None
    grouped_gemm: str | None = None
    te_ln_linear_qkv: bool = True
    te_ln_linear_mlp_fc1: bool = True
    te_ln_add_extra_state: ExtraState = "tensor_pickle_none"

    def __post_init__(self) -> None:
        if self.grouped_gemm not in (None, "te"):
            raise ConfigError(f"grouped_gemm must be None or 'te', found {self.grouped_gemm!r}")
        if self.pp_stages is not None and self.pp_size > 1 and len(self.pp_stages) != self.pp_size:
            raise ConfigError(
                f"pp_stages must have the layers of each of {self.pp_size} stages, found {self.pp_stages}"
            )
        if self.te_ln_add_extra_state not in EXTRA_STATES:
            raise ConfigError(
                f"te_ln_add_extra_state must be one of {EXTRA_STATES}, found {self.te_ln_add_extra_state!r}"
            )
        if self.te_ln_linear_qkv != self.te_ln_linear_mlp_fc1:
            raise ConfigError("te_ln_linear_qkv and te_ln_linear_mlp_fc1 must be the same: one module fuses both norms")

    @property
    def dims(self) -> ParallelDims:
        """The mesh."""
        layout = None
        if self.pp_stages is not None and self.pp_size > 1:
            first, *others = ("t" * count for count in self.pp_stages)
            layout = "|".join((f"E{first}", *others)) + "L"
        return ParallelDims(tp=self.tp_size, pp=self.pp_size, ep=self.ep_size, etp=self.tpe_size, layout=layout)

    @property
    def style(self) -> Style:
        """The kind of model that loads the files, which decides the names of parameters."""
        return Style(self.te_ln_linear_qkv, self.grouped_gemm == "te", self.te_ln_add_extra_state)


def read_conversion(hf_ckpt_path: str, ckpt_cfg: Mapping[str, Any]) -> ConvertorSettings:
    """Read the block ``ckpt_convertor`` (first called ``ckpt``).

    Raises:
        ConfigError: a key is unknown, or has a value that is not possible.
    """
    unknown = sorted(set(ckpt_cfg) - set(_ASKED) - set(_UNUSED))
    if unknown:
        raise ConfigError(f"the convertor's block has unknown keys {unknown}; remove them")
    if not ckpt_cfg.get("save_path"):
        raise ConfigError("the convertor's block must have a save_path, found none")
    may_be_none = ("te_ln_add_extra_state", "grouped_gemm")
    named = {_ASKED[key]: value for key, value in ckpt_cfg.items() if key in _ASKED}
    fields = {name: value for name, value in named.items() if value is not None or name in may_be_none}
    if fields.get("pp_stages") is not None:
        fields["pp_stages"] = tuple(fields["pp_stages"])
    return ConvertorSettings(load_path=str(hf_ckpt_path), **fields)


def as_conversion(config: Any) -> ConvertorSettings:
    """Convert RLinf's ``ConvertorConfig`` to a ``ConvertorSettings``; a ``ConvertorSettings`` is returned unchanged."""
    if isinstance(config, ConvertorSettings):
        return config
    if getattr(config, "schedular", "1f1b") != "1f1b":
        raise ConfigError(f"schedular must be '1f1b', found {config.schedular!r}: we have no such pipeline stages")
    names = ConvertorSettings.__dataclass_fields__
    fields = {name: getattr(config, name) for name in names if hasattr(config, name)}
    stages = fields.get("pp_stages")
    return ConvertorSettings(**{**fields, "pp_stages": None if stages is None else tuple(stages)})
