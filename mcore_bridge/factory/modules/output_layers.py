"""Output layers: small heads that every TP rank holds whole, no head, and an LM head that hides the padding."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer import TransformerConfig
    from transformers import PretrainedConfig

_NEVER = -1e30
"""The logit of padding. Trainers multiply logits by probabilities, which are zero here, so it must be finite. It stays
finite after a division by a temperature; verl's smallest is 1e-8.
"""


class ReplicatedHead(nn.Module):
    """A linear layer ``[num_outputs, hidden]`` that is equal on all TP ranks, in place of ``GPTModel.output_layer``.

    With sequence parallelism it runs on this rank's tokens and gathers the few outputs. So each rank has only a part of
    its gradient, as with norms, and its parameters have the ``sequence_parallel`` attribute of norms.
    """

    def __init__(
        self, config: TransformerConfig, num_outputs: int, *, bias: bool, tp_group: torch.distributed.ProcessGroup
    ) -> None:
        from mcore_bridge.factory.modules.torch_modules import placement

        super().__init__()
        self.sequence_parallel, self.tp_group = config.sequence_parallel, tp_group
        where = placement(config)
        self.weight = nn.Parameter(torch.empty(num_outputs, config.hidden_size, **where))
        self.bias = nn.Parameter(torch.empty(num_outputs, **where)) if bias else None
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(
        self, input_: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[Tensor, None]:
        """``[s, b, hidden]`` to fp32 ``[s of all TP ranks, b, num_outputs]``. The options of an LM head are ignored."""
        return _gathered(nn.functional.linear(input_, self.weight, self.bias).float(), self), None


class DeepHead(ReplicatedHead):
    """A ``ReplicatedHead`` behind a linear layer ``[hidden, hidden]`` and a relu; both layers have a bias."""

    def __init__(
        self, config: TransformerConfig, num_outputs: int, *, tp_group: torch.distributed.ProcessGroup
    ) -> None:
        from mcore_bridge.factory.modules.torch_modules import placement

        super().__init__(config, num_outputs, bias=True, tp_group=tp_group)
        self.dense = nn.Linear(config.hidden_size, config.hidden_size, **placement(config))
        for parameter in self.dense.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(
        self, input_: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[Tensor, None]:
        """``[s, b, hidden]`` to fp32 ``[s of all TP ranks, b, num_outputs]``. The options of an LM head are ignored."""
        return super().forward(self.dense(input_).relu())


class NoHead(nn.Module):
    """Returns hidden states in place of logits: ``[s, b, hidden]``. With SP they are gathered over TP ranks."""

    weight = None

    def __init__(self, config: TransformerConfig, *, tp_group: torch.distributed.ProcessGroup) -> None:
        super().__init__()
        self.sequence_parallel, self.tp_group = config.sequence_parallel, tp_group

    def forward(
        self, input_: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[Tensor, None]:
        """The hidden states of all tokens. The options of an LM head are ignored."""
        return _gathered(input_, self), None


def _gathered(tokens: Tensor, head: ReplicatedHead | NoHead) -> Tensor:
    """Gather the tokens of all TP ranks, which compute equal values from them."""
    from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

    if not head.sequence_parallel:
        return tokens
    whole: Tensor = gather_from_sequence_parallel_region(tokens, tensor_parallel_output_grad=False, group=head.tp_group)
    return whole


def order_gradient(chunk: GPTModel) -> None:
    """Let the gradient of logits come back to a frozen LM head as rows of tokens, one after the other.

    megatron-core turns logits to ``[b, s, vocab]``, so their gradient has another order of memory. With a frozen head
    torch would then make a product for each token, and each would read the whole weight.
    """
    if chunk.post_process:
        chunk.output_layer.register_forward_hook(_order_gradient, with_kwargs=True)


def _order_gradient(head: Any, inputs: tuple[Any, ...], named: dict[str, Any], output: tuple[Tensor, object]) -> None:
    logits, weight = output[0], named.get("weight")
    is_frozen = not (head.weight if weight is None else weight).requires_grad
    if is_frozen and logits.requires_grad:
        logits.register_hook(lambda grad: grad.flatten(0, 1).unflatten(0, grad.shape[:2]))


class HiddenPadding:
    """A forward hook of the LM head that hides the rows that pad the vocabulary.

    Without it the logit of a padded row would be zero, not minus infinity, and the loss would depend on ``tp``.
    """

    def __init__(self, vocab_size: int, model: GPTModel) -> None:
        self.vocab_size, self.padded_vocab_size, self.tp_group = vocab_size, model.vocab_size, model.tp_group

    def __call__(self, module: nn.Module, inputs: object, output: tuple[Tensor, Tensor | None]) -> None:
        logits = output[0]
        size = logits.size(-1)  # of this TP rank, unless logits are gathered
        first = 0 if size == self.padded_vocab_size else size * self.tp_group.rank()
        if first + size > self.vocab_size:
            logits[..., max(self.vocab_size - first, 0) :] = max(_NEVER, torch.finfo(logits.dtype).min)


def hide_padding(chunk: GPTModel, vocab_size: int) -> None:
    """Make the LM head of a last stage hide rows beyond ``vocab_size``, and note this size on its weight."""
    if chunk.post_process and vocab_size < chunk.vocab_size:
        chunk.output_layer.register_forward_hook(HiddenPadding(vocab_size, chunk))
        output_weight(chunk).hf_vocab_size = vocab_size


def bias_output_layer(chunk: GPTModel) -> None:
    """Adds a bias to the LM head of a last stage, if ``config.output_layer_bias`` is set. TP ranks hold parts of it."""
    from mcore_bridge.factory.modules.torch_modules import placement

    if chunk.post_process and getattr(chunk.config, "output_layer_bias", False):
        layer = chunk.output_layer
        layer.bias = nn.Parameter(torch.zeros(layer.output_size_per_partition, **placement(chunk.config)))
        output_weight(chunk).output_bias = True


def output_weight(chunk: GPTModel) -> Any:
    """The weight of a last stage's LM head: its own or, if tied on a stage with both, the weight of the embedding."""
    own = chunk.output_layer.weight
    return chunk.shared_embedding_or_output_weight() if own is None else own


def replace_output_layer(model: GPTModel, hf: PretrainedConfig, *, head: str) -> None:
    """Replaces the LM head of a last stage by a small head or none. Other stages, and ``head="lm"``, stay unchanged.

    Args:
        model: a chunk, built with ``share_embeddings_and_output_weights=False`` unless head is "lm".
        hf: the HF config. It has the number of labels, and by its architecture whether there is a bias
            (``...ForTokenClassification`` has one).
        head: "lm", "value" (one output), "classification", "process_reward" or "none".
    """
    if head == "lm" or not model.post_process:
        return
    if head == "none":
        model.output_layer = NoHead(model.config, tp_group=model.tp_group)
        model.sharded_state_dict = partial(_without_output_weight, model)
        return
    num_outputs = 1 if head == "value" else hf.num_labels
    if head == "process_reward":
        model.output_layer = DeepHead(model.config, num_outputs, tp_group=model.tp_group)
    else:
        bias = any(name.endswith("ForTokenClassification") for name in hf.architectures or ())
        model.output_layer = ReplicatedHead(model.config, num_outputs, bias=bias, tp_group=model.tp_group)
    model.output_layer.weight.is_embedding_or_output_parameter = True


def _without_output_weight(model: GPTModel, *args: Any, **options: Any) -> Any:
    """The ``sharded_state_dict`` of a last stage without a head; megatron-core's own requires the weight of a head."""
    model.post_process = False
    try:
        return type(model).sharded_state_dict(model, *args, **options)
    finally:
        model.post_process = True


def initialise_head(model: GPTModel, seed: int) -> None:
    """Draws a head's weights from N(0, init_method_std) and zeroes biases; equal on all ranks with the same seed."""
    head = getattr(model, "output_layer", None)
    if not isinstance(head, ReplicatedHead) or head.weight.is_meta:
        return
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in head.parameters():
            drawn = torch.zeros(parameter.shape)
            if parameter.dim() > 1:
                drawn.normal_(std=model.config.init_method_std, generator=generator)
            parameter.copy_(drawn)
