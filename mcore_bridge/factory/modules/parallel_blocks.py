"""Attention and MLP in parallel: both read the input of the layer. Usually the MLP reads the output of attention.

megatron-core's layer computes first attention, then the MLP. Here the norm before the MLP ignores its input and returns
a norm of the layer's input. All other code, also the sums of residuals, is megatron-core's.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from mcore_bridge.errors import ConfigError
from mcore_bridge.factory.modules.backend import LayerContext, norm_of, submodules_of


def adapt_parallel(layer: Any, context: LayerContext) -> None:
    """Puts two norms that share a ``SharedInput`` into a layer, if attention and MLP are side by side.

    ``parallel_norms`` of its config is 1 (attention and MLP read one norm), 2 (a norm each), or not set.
    """
    config, backend = context.config, context.backend
    norms = getattr(config, "parallel_norms", None)
    if norms is None:
        return
    if config.recompute_granularity == "selective" and "layernorm" in (config.recompute_modules or ()):
        raise ConfigError(
            "recompute_modules must be without 'layernorm' if attention and MLP are side by side. The MLP reads the "
            "output of the first norm, which recomputation would discard. Remove 'layernorm'."
        )
    if backend == "te":  # its usual linear layers have a norm inside
        from megatron.core.extensions.transformer_engine import TEColumnParallelLinear

        layer.self_attention.submodules.linear_qkv = TEColumnParallelLinear
        if not hasattr(submodules_of(layer.mlp), "router"):
            submodules_of(layer.mlp).linear_fc1 = TEColumnParallelLinear
    memory, norm = SharedInput(), norm_of(backend, config)
    layer.input_layernorm = memory.of_output(norm) if norms == 1 else memory.of_input(norm)
    layer.pre_mlp_layernorm = memory.recalled() if norms == 1 else memory.recalling(norm)


class SharedInput:
    """Carries a tensor from the first norm of a layer to its second. Between two forwards it is empty."""

    def __init__(self) -> None:
        self.kept: Tensor | None = None

    def of_output(self, norm: type) -> type:
        """``norm``, which stores its output here."""
        return _hooked(norm, lambda module: module.register_forward_hook(self._keep_output))

    def of_input(self, norm: type) -> type:
        """``norm``, which stores its input here."""
        return _hooked(norm, lambda module: module.register_forward_pre_hook(self._keep_input))

    def recalling(self, norm: type) -> type:
        """``norm``, applied to the stored tensor. Its own input is ignored."""
        return _hooked(norm, lambda module: module.register_forward_pre_hook(lambda *_: (self._take(),)))

    def recalled(self) -> type:
        """A class in place of a norm, which returns the stored tensor."""
        memory = self

        class Recalled(nn.Module):
            """Returns the tensor that the first norm has stored, and ignores its input."""

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
        """``norm`` with a hook. The constructor returns the norm, like megatron-core's ``TENorm``."""

        def __new__(cls, **arguments: Any) -> Any:
            module = norm(**arguments)
            hook(module)
            return module

    return Hooked
