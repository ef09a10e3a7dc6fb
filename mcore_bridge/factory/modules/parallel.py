"""Attention and MLP side by side: the MLP reads what the layer was given, and not what attention has added to it.

megatron-core's layer computes one after the other. Here the norm before its MLP gives what one before attention would
have given. Everything else is megatron-core's, sums of residuals too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from mcore_bridge.errors import ConfigError
from mcore_bridge.factory.modules.backend import Backend, norm_of, submodules_of

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig


def adapt_parallel(layer: Any, config: TransformerConfig, backend: Backend) -> None:
    """Put a pair of norms that know each other into a layer.

    Args:
        layer: the submodules of a layer, changed in place. No other layer has them.
        config: its ``parallel_norms`` is 1 (attention and MLP read one norm), 2 (a norm each), or not set.
        backend: whose modules the layer has.
    """
    norms = getattr(config, "parallel_norms", None)
    if norms is None:
        return
    if config.recompute_granularity == "selective" and "layernorm" in (config.recompute_modules or ()):
        raise ConfigError(
            "recompute_modules must be without 'layernorm' where attention and MLP are side by side: the MLP needs the "
            "output of the first norm while it would be thrown away. Remove it."
        )
    if backend == "te":  # whose linear layers would norm what they are given
        from megatron.core.extensions.transformer_engine import TEColumnParallelLinear

        layer.self_attention.submodules.linear_qkv = TEColumnParallelLinear
        if not hasattr(submodules_of(layer.mlp), "router"):
            submodules_of(layer.mlp).linear_fc1 = TEColumnParallelLinear
    memory, norm = Memory(), norm_of(backend, config)
    layer.input_layernorm = memory.of_output(norm) if norms == 1 else memory.of_input(norm)
    layer.pre_mlp_layernorm = memory.recalled() if norms == 1 else memory.recalling(norm)


class Memory:
    """What a layer's second norm needs of its first, from one to the other. It holds nothing in between forwards."""

    def __init__(self) -> None:
        self.kept: Tensor | None = None

    def of_output(self, norm: type) -> type:
        """``norm``, which keeps what it gives."""
        return _hooked(norm, lambda module: module.register_forward_hook(self._keep_output))

    def of_input(self, norm: type) -> type:
        """``norm``, which keeps what it is given."""
        return _hooked(norm, lambda module: module.register_forward_pre_hook(self._keep_input))

    def recalling(self, norm: type) -> type:
        """``norm`` of what was kept, whatever it is given."""
        return _hooked(norm, lambda module: module.register_forward_pre_hook(lambda *_: (self._take(),)))

    def recalled(self) -> type:
        """A class that stands for a norm and gives what was kept."""
        memory = self

        class Recalled(nn.Module):
            """Gives what the first norm gave."""

            def __init__(self, **arguments: Any) -> None:
                super().__init__()

            def forward(self, hidden: Tensor) -> Tensor:
                return memory._take()

        return Recalled

    def _keep_output(self, module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        self.kept = output

    def _keep_input(self, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        self.kept = inputs[0]

    def _take(self) -> Tensor:
        kept, self.kept = self.kept, None
        assert kept is not None
        return kept


def _hooked(norm: type, hook: Any) -> type:
    class Hooked:
        """``norm`` with a hook; its constructor returns it, as that of megatron-core's ``TENorm`` does."""

        def __new__(cls, **arguments: Any) -> Any:
            module = norm(**arguments)
            hook(module)
            return module

    return Hooked
