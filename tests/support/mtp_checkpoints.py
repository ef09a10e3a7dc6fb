"""Checkpoints with MTP layers, as publishers write them, and reference results from transformers' modules.

transformers has no MTP layers: their tensors come from a model of one layer, under the publisher's names.
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


FLAT = ("enorm", "hnorm", "eh_proj", "final_layernorm")
MIMO = ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm")
QWEN = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")
STYLES = {
    "nemotron_h": Style("mtp.layers.{number}.", FLAT),
    "qwen": Style("mtp.layers.{number}.", QWEN, beside="mtp."),
    "mimo": Style("model.mtp_layers.{number}.", MIMO, hidden_first=True),
    "hy_v3": Style(around=FLAT),
    "bailing_hybrid": Style(around=FLAT),
    "exaone": Style("mtp.layers.{number}.", QWEN, beside="mtp.", like_first=True),
}
"""By the beginning of the ``model_type``."""
HALVES = ("nemotron_h", "nemotron_h-narrow-experts")
NAMES = ("glm4_moe", "deepseek_v3", "glm4_moe_lite", "hy_v3", "qwen3_next", "qwen3.5", "qwen3.5-moe", *HALVES)
NAMES += ("exaone_moe", "exaone4", "bailing_hybrid")
_KINDS = {"layer_types": "full_attention", "mlp_layer_types": "sparse", "indexer_types": "full"}
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
        hf.mlp_layer_types = [*hf.mlp_layer_types[:-1], "sparse"]
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
        norm, width = drawn[_norm(hf)], hf.hidden_size
        for own, prefix in prefixes.items():
            inner = {name: tensor for name, tensor in drawn.items() if name.startswith(own)}
            state |= {name.replace(own, prefix): tensor for name, tensor in inner.items()}
        generator = torch.Generator().manual_seed(number)
        state[around["eh_proj"]] = torch.randn(width, 2 * width, generator=generator) * (2 * width) ** -0.5
        for shift, name in enumerate(("enorm", "hnorm", "shared_head.norm")):
            state[around[name]] = norm.roll(shift).contiguous()
        if style_of(hf).copies:
            state[f"{prefix}embed_tokens.weight"] = state["model.embed_tokens.weight"].clone()
            state[f"{prefix}shared_head.head.weight"] = state["lm_head.weight"].clone()
    return state


def is_mtp(hf: Any, name: str) -> bool:
    """Whether an HF tensor belongs to the one MTP layer."""
    return name.startswith(("mtp.", "model.mtp_layers.", f"model.layers.{hf.num_hidden_layers}."))


def one_layer(hf: Any) -> Any:
    """``hf`` with one layer of the kind of MTP layers, or with the two halves of this layer."""
    if _are_flat(hf):
        return type(hf).from_dict({**hf.to_dict(), "layers_block_type": hf.mtp_layers_block_type})
    fields = {**hf.to_dict(), "num_hidden_layers": 1, "first_k_dense_replace": 0, "mlp_only_layers": []}
    for name, value in _KINDS.items():
        if fields.get(name):
            fields[name] = fields[name][:1] if style_of(hf).like_first else [value]
    return type(hf).from_dict({name: value for name, value in fields.items() if hasattr(hf, name)})


def reference_logits(hf: Any) -> Tensor:
    """The logits of the one MTP layer of ``published(hf)``, fp32 [BATCH, SEQ, vocab].

    The next token's embedding and the decoder's output go through norms and a projection, and then through a model of
    one layer, with the norm and head of the MTP layer.
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
        hidden = model.model(ids).last_hidden_state
        norm.weight.copy_(state[around["enorm"]])
        embedded = norm(model.get_input_embeddings()(following))
        norm.weight.copy_(state[around["hnorm"]])
        parts = [embedded, norm(hidden)]
        joined = torch.cat(parts[::-1] if style_of(hf).hidden_first else parts, -1)
        return last(inputs_embeds=joined @ state[around["eh_proj"]].T, use_cache=False).logits


def without_ends(hf: Any, state: dict[str, Tensor], number: int) -> dict[str, Tensor]:
    """The tensors of ``one_layer`` from an MTP layer, with the norm of the MTP layer, and embedding and head of the
    model.
    """
    prefixes, around = names_of(hf, number)
    inner = {}
    for own, prefix in prefixes.items():
        of_layer = [name for name in state if name.startswith(prefix) and name.replace(prefix, "") not in _extra()]
        inner |= {name.replace(prefix, own): state[name] for name in of_layer}
    ends = ("model.embed_tokens.weight", "backbone.embeddings.weight", "lm_head.weight", "model.word_embeddings.weight")
    inner |= {name: state[name] for name in ends if name in state}
    inner[_norm(hf)] = state[around["shared_head.norm"]]
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


def _norm(hf: Any) -> str:
    return "backbone.norm_f.weight" if _are_flat(hf) else "model.norm.weight"


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
    return {"model.layers.0.": place}, around


def _extra() -> set[str]:
    return {f"{name}.weight" for name in (*AROUND, *FLAT, *MIMO, "embed_tokens", "shared_head.head")}
