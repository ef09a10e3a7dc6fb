"""Checkpoints with MTP layers, as publishers write them, and reference results from transformers' modules.

transformers has no MTP layers: their tensors come from a model of one layer, under the publisher's names. In a model
with several residual streams, an MTP layer reads all of them, and adds the embedding of the next token to each.
"""

import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tests import zoo
from tests.support import twins
from tests.support.parity import BATCH, SEQ, reference_model, tokens
from tests.support.strategies import random_state, tiny

AROUND = ("enorm", "hnorm", "eh_proj", "shared_head.norm")


@dataclass(frozen=True)
class Style:
    """The names of MTP layers in the files of a family.

    ``place`` is the prefix of the inner layer, and ``beside`` the prefix of the modules around it, if it is another.
    ``number`` stands for the number of the MTP layer, ``behind`` for this number plus the number of decoder layers.
    """

    place: str = "model.layers.{behind}."
    around: tuple[str, ...] = AROUND
    beside: str | None = None
    copies: bool = False
    """Whether the layer has copies of the embedding and the head."""
    hidden_first: bool = False
    """Whether the projection multiplies hidden states, then the embedding."""
    like_first: bool = False
    """Whether the inner layer is like the first layer of the decoder, in place of the last."""
    kinds: tuple[str, str] = ("full_attention", "sparse")
    """The kinds of the inner layer: in ``layer_types``, and in ``mlp_layer_types``."""
    inner: tuple[str, ...] = ("model.layers.0.",)
    """Beginnings of names in a model of the inner layer. ``place`` stands for the first, and precedes the others."""
    norm: str = "model.norm.weight"
    """The name of the decoder's last norm."""


FLAT = ("enorm", "hnorm", "eh_proj", "final_layernorm")
MIMO = ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm")
QWEN = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")
BY_STREAM = ("enorm", "hnorm", "{e,h}_proj", "norm")
STYLES = {
    "nemotron_h": Style("mtp.layers.{number}.", FLAT, norm="backbone.norm_f.weight"),
    "qwen": Style("mtp.layers.{number}.", QWEN, beside="mtp."),
    "mimo": Style("model.mtp_layers.{number}.", MIMO, hidden_first=True),
    "hy_v3": Style(around=FLAT),
    "bailing_hybrid": Style(around=FLAT),
    "exaone": Style("mtp.layers.{number}.", QWEN, beside="mtp.", like_first=True),
    "deepseek_v4": Style(
        *("mtp.{number}.", BY_STREAM),
        kinds=("sliding_attention", "moe"),
        inner=("layers.0.", "hc_head_"),
        norm="norm.weight",
    ),
}
"""By the beginning of the ``model_type``."""
HALVES = ("nemotron_h", "nemotron_h-narrow-experts")
NAMES = ("glm4_moe", "deepseek_v3", "glm4_moe_lite", "hy_v3", "qwen3_next", "qwen3.5", "qwen3.5-moe", *HALVES)
NAMES += ("exaone_moe", "exaone4", "bailing_hybrid", "deepseek_v4")
_OF_TWINS = {"mimo": {**tiny("qwen2", num_key_value_heads=2, hidden_size=192).to_dict(), "attention_bias": True}}
"""Configs of families that transformers lacks, by name."""
ALL = (*NAMES, *_OF_TWINS)
CASES = [*zoo.here(NAMES), *_OF_TWINS]


def params(names: Iterable[Any], case_of: Callable[[Any], str] = str) -> list[Any]:
    """Like ``zoo.params``, also for families that transformers lacks."""
    return [
        param for name in names for param in ([name] if case_of(name) in _OF_TWINS else zoo.params([name], case_of))
    ]


def config(name: str, num_mtp_layers: int = 1) -> Any:
    """The HF config of a case of the zoo, with MTP layers. They are of the kind of its last layer, or of its first."""
    hf = twins.read(name, _OF_TWINS[name]) if name in _OF_TWINS else zoo.cases()[name].hf
    if getattr(hf, "mlp_layer_types", None):
        hf.mlp_layer_types = [*hf.mlp_layer_types[:-1], style_of(hf).kinds[1]]
    if not _are_beside(hf):
        hf.num_nextn_predict_layers = num_mtp_layers
    return hf


def published(hf: Any, num_mtp_layers: int = 1) -> dict[str, Tensor]:
    """The tensors of a checkpoint with MTP layers: numbered after the decoder's, with copies, or one beside the
    decoder.
    """
    state = random_state(hf)
    for number in range(num_mtp_layers):
        prefixes, around = names_of(hf, number)
        drawn = random_state(one_layer(hf), seed=1 + number)
        norm, width = drawn[style_of(hf).norm], hf.hidden_size
        for own, prefix in prefixes.items():
            inner = {name: tensor for name, tensor in drawn.items() if name.startswith(own)}
            state |= {name.replace(own, prefix): tensor for name, tensor in inner.items()}
        generator = torch.Generator().manual_seed(number)
        projection = torch.randn(width, 2 * width, generator=generator) * (2 * width) ** -0.5
        state |= in_parts(around["eh_proj"], projection)
        for shift, name in enumerate(("enorm", "hnorm", "shared_head.norm")):
            state[around[name]] = norm.roll(shift).contiguous()
        if style_of(hf).copies:
            state[f"{prefix}embed_tokens.weight"] = state["model.embed_tokens.weight"].clone()
            state[f"{prefix}shared_head.head.weight"] = state["lm_head.weight"].clone()
    return state


def in_parts(name: str, projection: Tensor) -> dict[str, Tensor]:
    """The projection of an MTP layer under its name, or its halves under two names."""
    names = _parts(name)
    return {each: part.contiguous() for each, part in zip(names, projection.chunk(len(names), 1), strict=True)}


def joined_parts(name: str, state: dict[str, Tensor]) -> Tensor:
    """The inverse of ``in_parts``."""
    return torch.cat([state[each] for each in _parts(name)], 1)


def _parts(name: str) -> list[str]:
    return [name.replace("{e,h}", part) for part in "eh"] if "{" in name else [name]


def is_mtp(hf: Any, name: str) -> bool:
    """Whether an HF tensor belongs to the one MTP layer."""
    return name.startswith(("mtp.", "model.mtp_layers.", f"model.layers.{hf.num_hidden_layers}."))


def one_layer(hf: Any) -> Any:
    """``hf`` with one layer of the kind of MTP layers, or with the two halves of this layer."""
    if _are_flat(hf):
        return type(hf).from_dict({**hf.to_dict(), "layers_block_type": hf.mtp_layers_block_type})
    fields = {**hf.to_dict(), "num_hidden_layers": 1, "first_k_dense_replace": 0, "mlp_only_layers": []}
    kinds = dict(zip(("layer_types", "mlp_layer_types"), style_of(hf).kinds, strict=True))
    for name, value in {**kinds, "indexer_types": "full"}.items():
        if fields.get(name):
            fields[name] = fields[name][:1] if style_of(hf).like_first else [value]
    return type(hf).from_dict({name: value for name, value in fields.items() if hasattr(hf, name)})


def reference_logits(hf: Any) -> Tensor:
    """The logits of the one MTP layer of ``published(hf)``, fp32 [BATCH, SEQ, vocab].

    The next token's embedding and the decoder's output go through norms and a projection, and then through a model of
    one layer, with the norm and head of the MTP layer. If there are streams, each goes through the projection.
    """
    state = published(hf)
    around = names_of(hf, 0)[1]
    inner = without_ends(hf, state, 0)
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as other:
        model, last = reference_model(hf, folder), reference_model(one_layer(hf), other, inner)
    ids = tokens(hf)
    following = torch.cat([ids[:, 1:], torch.zeros(BATCH, 1, dtype=ids.dtype)], 1)
    norm = model.model.norm_f if _are_flat(hf) else model.model.norm
    with torch.no_grad():
        _, hidden = outputs_of(model, input_ids=ids)
        norm.weight.copy_(state[around["enorm"]])
        embedded = norm(model.get_input_embeddings()(following))
        norm.weight.copy_(state[around["hnorm"]])
        joined = beside(embedded, norm(hidden), hidden_first=style_of(hf).hidden_first)
        states, _ = outputs_of(last, inputs_embeds=joined @ joined_parts(around["eh_proj"], state).T)
        return last.get_output_embeddings()(states)


def beside(embedded: Tensor, hidden: Tensor, *, hidden_first: bool = False) -> Tensor:
    """What the projection of an MTP layer reads: an embedding beside a hidden state, or beside each stream."""
    parts = [embedded.view(*embedded.shape[:2], *[1] * (hidden.dim() - 3), -1).expand_as(hidden), hidden]
    return torch.cat(parts[::-1] if hidden_first else parts, -1)


def outputs_of(model: Any, **inputs: Tensor) -> tuple[Tensor, Tensor]:
    """What the head of transformers' model reads, and what an MTP layer reads.

    It is the same ``[b, s, h]``, or all streams ``[b, s, n, h]``, which ``inputs_embeds`` then gives the first layer.
    """
    text = model.model
    if not hasattr(text, "hc_head"):
        states = text(**inputs, use_cache=False).last_hidden_state
        return states, states
    found: list[Tensor] = []
    hooks = [text.hc_head.register_forward_pre_hook(lambda module, given: found.append(given[0]))]
    if (streams := inputs.get("inputs_embeds")) is not None:
        hooks.append(text.layers[0].register_forward_pre_hook(lambda module, given: (streams, *given[1:])))
        inputs = {"inputs_embeds": streams[:, :, 0]}
    states = text(**inputs, use_cache=False).last_hidden_state
    for hook in hooks:
        hook.remove()
    return states, found[0]


def without_ends(hf: Any, state: dict[str, Tensor], number: int) -> dict[str, Tensor]:
    """The tensors of ``one_layer`` from an MTP layer, with the norm of the MTP layer, and embedding and head of the
    model.
    """
    prefixes, around = names_of(hf, number)
    outside = [name for each in around.values() for name in _parts(each)]
    outside += [f"{place}{name}.weight" for place in prefixes.values() for name in ("embed_tokens", "shared_head.head")]
    ends = ("model.embed_tokens.weight", "backbone.embeddings.weight", "lm_head.weight", "model.word_embeddings.weight")
    inner = {name: state[name] for name in (*ends, "embed.weight", "head.weight") if name in state}
    inner[style_of(hf).norm] = state[around["shared_head.norm"]]
    for name in state.keys() - set(outside):
        places = [(place, own) for own, place in prefixes.items() if name.startswith(place)]
        inner |= {name.replace(*longest): state[name] for longest in sorted(places)[-1:]}
    return inner


def predicted(model: Any, hf: Any) -> Tensor:
    """The logits of the single MTP layer of a chunk, on the rank's part of the vocabulary."""
    found: list[Tensor] = []
    hook = model.mtp.register_forward_hook(lambda module, inputs, output: found.append(output.chunk(2)[1]))
    ids = tokens(hf).to(next(model.parameters()).device)
    with torch.no_grad():
        model(ids, torch.arange(SEQ, device=ids.device).expand(BATCH, SEQ), None, labels=ids)
        head = model.shared_embedding_or_output_weight() if model.share_embeddings_and_output_weights else None
        logits: Tensor = model.output_layer(found[0], weight=head)[0]
    hook.remove()
    return logits.transpose(0, 1)


def style_of(hf: Any) -> Style:
    """How the files of a family name MTP layers."""
    return next((style for name, style in STYLES.items() if hf.model_type.startswith(name)), Style(copies=True))


def _are_beside(hf: Any) -> bool:
    return style_of(hf).beside is not None


def _are_flat(hf: Any) -> bool:
    return bool(hf.model_type == "nemotron_h")


def names_of(hf: Any, number: int) -> tuple[dict[str, str], dict[str, str]]:
    """Prefixes of the inner layer's names, by prefixes in a model of this layer; and names of the modules around it."""
    style = style_of(hf)
    if _are_flat(hf):  # HF numbers halves through
        halves = len(hf.mtp_layers_block_type)
        places = [style.place.format(number=halves * number + half) for half in range(halves)]
        around = {
            name: f"{places[-1 * (name == AROUND[-1])]}{own}.weight"
            for name, own in zip(AROUND, style.around, strict=True)
        }
        return {f"backbone.layers.{half}.": place for half, place in enumerate(places)}, around
    place = style.place.format(number=number, behind=hf.num_hidden_layers + number)
    beside = place if style.beside is None else style.beside
    around = {name: f"{beside}{own}.weight" for name, own in zip(AROUND, style.around, strict=True)}
    first, *others = style.inner
    return {first: place, **{own: place + own for own in others}}, around
