"""A training step with the loss of MTP layers, computed by transformers' modules and autograd.

The formula comes from DeepSeek-V3's report; vLLM, SGLang and megatron-core use it, too. Depth k takes the hidden states
of depth k - 1 and the embeddings of the tokens k places further on. Each goes through a norm, and both together through
a projection, the inner layer and a norm. The head of the model then predicts the token after the embedded one.
"""

import tempfile
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, embedding, rms_norm

from tests.support.mtp_checkpoints import (
    beside,
    in_parts,
    joined_parts,
    names_of,
    one_layer,
    outputs_of,
    published,
    without_ends,
)
from tests.support.parity import reference_model
from tests.support.strategies import on_disk


def reference_step(
    hf: Any, batch: Tensor, *, depths: int, repeated: bool = False, scale: float, ranks: Sequence[Sequence[int]] = ()
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss without the MTP loss, and the gradients of the sum of both, by name, for ``published(hf)``.

    Args:
        hf: a config with MTP layers under ``mtp.``.
        batch: int64 ``[sequences, length + 1]``, of which inputs and labels are one apart.
        depths: the number of predicted tokens.
        repeated: whether one MTP layer predicts all.
        scale: the factor of the mean loss of all depths.
        ranks: the places of each context-parallel rank. megatron-core gives the means of the ranks equal weights. None:
            there is one rank.
    """
    held = 1 if repeated else depths
    state = published(hf, held)
    decoder = {name: tensor for name, tensor in state.items() if not name.startswith("mtp.")}
    model = _model(hf, decoder)
    model.get_input_embeddings().padding_idx = None  # a token of padding would have no gradient
    layers = [_Layer(hf, state, number) for number in range(held)]
    ids, labels = batch[:, :-1], batch[:, 1:]
    states, hidden = outputs_of(model, input_ids=ids)
    loss = cross_entropy(model.lm_head(states).flatten(0, 1), labels.flatten())
    losses = []
    for depth in range(1, depths + 1):
        layer = layers[0 if repeated else depth - 1]
        following = torch.cat([ids[:, depth:], ids.new_zeros(len(ids), depth)], 1)
        states, hidden = layer(hidden, embedding(following, model.get_input_embeddings().weight))
        logits = model.lm_head(states)[:, :-depth]
        each = cross_entropy(logits.transpose(1, 2), labels[:, depth:], reduction="none")
        places = ranks or [range(ids.size(1))]
        means = [each[:, [place for place in own if place < each.size(1)]].mean() for own in places]
        losses.append(torch.stack(means).mean())
    (loss + scale * torch.stack(losses).mean()).backward()
    grads = on_disk(model, {name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    for layer in layers:
        grads |= layer.grads()
    return loss.detach(), grads


def _model(hf: Any, state: dict[str, Tensor]) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        return reference_model(hf, folder, state)


class _Layer:
    """An MTP layer: transformers' model of the inner layer, without embedding and head, and the modules around it."""

    def __init__(self, hf: Any, state: dict[str, Tensor], number: int) -> None:
        self.places, self.names = names_of(hf, number)
        self.norms = {name: state[self.names[name]].clone().requires_grad_() for name in ("enorm", "hnorm")}
        self.projection = joined_parts(self.names["eh_proj"], state).requires_grad_()
        self.inner = _model(one_layer(hf), without_ends(hf, state, number))
        self.eps = getattr(hf, "layer_norm_epsilon", None) or hf.rms_norm_eps

    def __call__(self, hidden: Tensor, following: Tensor) -> tuple[Tensor, Tensor]:
        """What the head reads, and what the next MTP layer reads."""
        embedded, hidden = (
            rms_norm(tensor, tensor.shape[-1:], self.norms[name], self.eps)
            for name, tensor in (("enorm", following), ("hnorm", hidden))
        )
        return outputs_of(self.inner, inputs_embeds=beside(embedded, hidden) @ self.projection.T)

    def grads(self) -> dict[str, Tensor]:
        found = {self.names[name]: tensor.grad for name, tensor in self.norms.items()}
        found |= in_parts(self.names["eh_proj"], self.projection.grad)
        own = on_disk(self.inner, {name: p.grad for name, p in self.inner.named_parameters() if p.grad is not None})
        for name, grad in own.items():
            place = next((place for place in self.places if name.startswith(place)), None)
            found[self.names["shared_head.norm"] if place is None else name.replace(place, self.places[place])] = grad
        return {name: grad for name, grad in found.items() if grad is not None}
