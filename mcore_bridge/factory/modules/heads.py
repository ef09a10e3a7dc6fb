"""Output layers: small heads, which every TP rank holds whole, and an LM head whose padding takes no part."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import Tensor, nn

from mcore_bridge.errors import ConfigError

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer import TransformerConfig
    from transformers import PretrainedConfig

Head = Literal["lm", "value", "classification"]
_NEVER = -1e30
"""The logit of padding: finite, and so after a division by a temperature (verl's smallest is 1e-8), since trainers
multiply logits by probabilities that are zero here."""


class ReplicatedHead(nn.Module):
    """``[num_outputs, hidden]``, the same on every TP rank, called as mcore calls ``GPTModel.output_layer``.

    Under sequence parallelism it runs on this rank's tokens and gathers its few outputs, so that its gradient is a part
    of the sum, as that of a norm is, and carries the same mark.
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
        """``[s, b, hidden]`` to fp32 ``[s of all TP ranks, b, num_outputs]``. An LM head's options do not apply."""
        from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

        logits = nn.functional.linear(input_, self.weight, self.bias).float()
        if self.sequence_parallel:
            logits = gather_from_sequence_parallel_region(
                logits, tensor_parallel_output_grad=False, group=self.tp_group
            )
        return logits, None


class HiddenPadding:
    """A forward hook of the LM head: rows that pad the vocabulary for ``tp`` take no part in any softmax.

    Without it, loss and gradients would depend on ``tp``: the logit of a padded row is zero, not minus infinity.
    """

    def __init__(self, vocab_size: int, model: GPTModel) -> None:
        self.vocab_size, self.padded_vocab_size, self.tp_group = vocab_size, model.vocab_size, model.tp_group

    def __call__(self, module: nn.Module, inputs: object, output: tuple[Tensor, Tensor | None]) -> None:
        logits = output[0]
        size = logits.size(-1)  # a TP rank's share, unless gathered
        first = 0 if size == self.padded_vocab_size else size * self.tp_group.rank()
        if first + size > self.vocab_size:
            logits[..., max(self.vocab_size - first, 0) :] = max(_NEVER, torch.finfo(logits.dtype).min)


def hide_padding(chunk: GPTModel, vocab_size: int) -> None:
    """Have a last stage's LM head hide the rows beyond ``vocab_size``, and its weight say how many are not hidden."""
    if chunk.post_process and vocab_size < chunk.vocab_size:
        chunk.output_layer.register_forward_hook(HiddenPadding(vocab_size, chunk))
        output_weight(chunk).hf_vocab_size = vocab_size


def output_weight(chunk: GPTModel) -> Any:
    """What a last stage's LM head multiplies by: its own weight or, tied on a stage with both, the embedding's."""
    own = chunk.output_layer.weight
    return chunk.shared_embedding_or_output_weight() if own is None else own


def check_head(head: str) -> None:
    """Raise ``ConfigError`` unless ``head`` is one that we build."""
    if head not in get_args(Head):
        raise ConfigError(f"head must be one of {', '.join(get_args(Head))}; got {head!r}")


def replace_output_layer(model: GPTModel, hf: PretrainedConfig, *, head: str) -> None:
    """Put the head in the place of the LM head of a last stage. Nothing happens on other stages or for ``head="lm"``.

    Args:
        model: a chunk, built with ``share_embeddings_and_output_weights=False`` unless head is "lm".
        hf: says how many labels a classifier has, and whether it has a bias (``...ForTokenClassification`` has).
        head: "lm", "value" (one output) or "classification".
    """
    if head == "lm" or not model.post_process:
        return
    num_outputs = 1 if head == "value" else hf.num_labels
    bias = any(name.endswith("ForTokenClassification") for name in hf.architectures or ())
    model.output_layer = ReplicatedHead(model.config, num_outputs, bias=bias, tp_group=model.tp_group)
    model.output_layer.weight.is_embedding_or_output_parameter = True


def initialise_head(model: GPTModel, seed: int) -> None:
    """Draw a head's weight from N(0, init_method_std) and zero its bias, alike on every rank that is given ``seed``."""
    head = getattr(model, "output_layer", None)
    if not isinstance(head, ReplicatedHead) or head.weight.is_meta:
        return
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(head.weight.shape, generator=generator) * model.config.init_method_std
    with torch.no_grad():
        head.weight.copy_(values)
        if head.bias is not None:
            head.bias.zero_()
