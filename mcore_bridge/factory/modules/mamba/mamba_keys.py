"""The tensors of a Mamba-2 mixer in checkpoints of megatron-core: z, x, B, C and dt are cut separately."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint, sharded_state_dict_default

try:
    from megatron.core.ssm.utils import _split_tensor_factory
except ImportError:  # megatron-core 0.16
    from megatron.core.ssm.gated_delta_net import _split_tensor_factory

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import nn

_OWN = ("A_log", "D", "dt_bias", "conv1d.weight", "conv1d.bias", "norm.weight")


def sharded_mixer(
    mixer: nn.Module, sections: Mapping[str, int], prefix: str, sharded_offsets: tuple[Any, ...], metadata: Any
) -> dict[str, Any]:
    """The ``sharded_state_dict`` of a mixer, with the keys of megatron-core's ``MambaMixer``.

    Args:
        mixer: the module, with its linear layers as ``in_proj`` and ``out_proj``.
        sections: this rank's numbers of rows of z, x, B, C and dt, in this order.
        prefix: the prefix of all keys.
        sharded_offsets: as megatron-core passes them.
        metadata: as megatron-core passes them.
    """
    parameters = dict(mixer.named_parameters())
    own = {name: parameters[name] for name in _OWN if name in parameters}
    tensors: dict[str, Any] = make_sharded_tensors_for_checkpoint(own, prefix, dict.fromkeys(own, 0), sharded_offsets)
    for name in ("in_proj", "out_proj"):
        linear = getattr(mixer, name)
        tensors |= sharded_state_dict_default(linear, f"{prefix}{name}.", sharded_offsets, metadata)
    parts = {"in_proj.weight": tuple(sections)} | dict.fromkeys(("conv1d.weight", "conv1d.bias"), tuple("xBC"))
    for name, names in parts.items():
        rows = [sections[part] for part in names]
        tensors[prefix + name] = _split_tensor_factory(tensors[prefix + name], rows, list(names), 0)
    return tensors
