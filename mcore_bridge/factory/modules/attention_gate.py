"""Attention whose output is multiplied by gates, which a projection of its own computes from the input of attention.

megatron-core's ``attention_output_gate`` has a sigmoid for each element, and fuses its projection with the projection
of queries. Here gates may also be one for each head, with softplus, and ``linear_gate`` computes them. Its rows are cut
over TP as heads are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  (the usual name)

from mcore_bridge.factory.modules.backend import LayerContext, mixed, separate_norm

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig


def adapt_gate(layer: Any, context: LayerContext) -> None:
    """Put gates into the attention of a layer, if its config has an ``attention_gate``, which says what has a gate."""
    if getattr(context.config, "attention_gate", None) is None:
        return
    gate = projection_beside(layer, context)
    layer.self_attention.module = mixed(GatedOutput, layer.self_attention.module)
    layer.self_attention.params = {**(layer.self_attention.params or {}), "gate": gate}


def projection_beside(layer: Any, context: LayerContext) -> Any:
    """A function that makes a projection of attention's input: ``(outputs, config, tp_group=...)``.

    It moves the norm before attention out of the projection of queries, since both share it.
    """
    if context.backend == "te":
        from megatron.core.extensions.transformer_engine import TEColumnParallelLinear as Linear

        if not context.config.multi_latent_attention:
            separate_norm(layer, context)
    else:
        from megatron.core.tensor_parallel import ColumnParallelLinear as Linear

    def make(outputs: int, own: TransformerConfig, *, tp_group: Any) -> Any:
        return Linear(
            own.hidden_size,
            outputs,
            config=own,
            init_method=own.init_method,
            gather_output=False,
            bias=False,
            skip_bias_add=False,
            is_expert=False,
            tp_comm_buffer_name="fc1",
            tp_group=tp_group,
        )

    return make


class GatedOutput(nn.Module):
    """Attention with a gate for each head, or for each element of a head."""

    config: Any
    linear_proj: nn.Module

    def __init__(self, *places: Any, config: TransformerConfig, gate: Any, **arguments: Any) -> None:
        super().__init__(*places, config=config, **arguments)
        of_values = config.v_head_dim if config.multi_latent_attention else config.kv_channels
        per_head: int = {"head": 1, "element": of_values}[config.attention_gate]
        self.linear_gate = gate(config.num_attention_heads * per_head, config, tp_group=arguments["pg_collection"].tp)
        self.gate: Tensor | None = None
        self.linear_proj.register_forward_pre_hook(self._multiply)  # an adapter reads what this hook returns

    def forward(self, hidden_states: Tensor, *inputs: Any, **options: Any) -> tuple[Tensor, Tensor | None]:
        """The output of attention ``[s, b, h]`` and its bias, from ``[s, b, h]``."""
        gate, _ = self.linear_gate(hidden_states)
        if self.config.attention_gate_activation == "softplus":
            self.gate = F.softplus(gate.float()).to(gate.dtype)
        else:
            self.gate = gate.sigmoid()
        outputs: tuple[Tensor, Tensor | None] = super().forward(hidden_states, *inputs, **options)
        return outputs

    def _multiply(self, proj: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Multiply attention's output ``[s, b, heads of this rank * dim]`` by the gates."""
        (attended, *others), (gate, self.gate) = inputs, (self.gate, None)
        assert gate is not None
        gated = attended.unflatten(-1, (gate.size(-1), -1)) * gate.unsqueeze(-1)
        return (gated.flatten(-2), *others)
