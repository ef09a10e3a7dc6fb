"""Canonical names of mcore parameters: they do not depend on the mesh, on wrappers or on the backend.

* Layer and expert numbers are global. They are read from the layers as built (``layer_number``,
  ``local_expert_indices``), and never computed from the mesh.
* Names of experts do not depend on whether experts are grouped in one module.
* Norms that TransformerEngine fuses into the next linear layer have the names of separate norms.

So an HF name has one canonical name. The inverse gives the names that a ``GPTModel`` has for canonical names.

This module also lists HF tensors that engines fuse within one load call, and that an engine must get together.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

# fmt: off
_FUSED_NORMS = (
    ("input_layernorm",             "self_attention.linear_qkv"),
    ("input_layernorm",             "self_attention.in_proj"),
    ("norm",                        "mixer.in_proj"),  # of a HybridModel
    ("self_attention.q_layernorm",  "self_attention.linear_q_up_proj"),
    ("self_attention.kv_layernorm", "self_attention.linear_kv_up_proj"),
    ("pre_mlp_layernorm",           "mlp.linear_fc1"),
)
# fmt: on
"""Norms of a layer, with the linear layers that follow them, into which TransformerEngine fuses them.

Their tensors are then ``layer_norm_weight`` and ``layer_norm_bias`` of the linear layer (megatron-core 0.16.1 and
0.19.2: gpt_layer_specs.py, experimental_attention_variant_module_specs.py)."""
EMBEDDING = "embedding.word_embeddings.weight"
TOWER = "vision."
"""The prefix of names of a tower's tensors, before their names in transformers' model."""
OF_DRAFTS = ("fc.", "fc_norm.", "context_norm.", "vocabulary.", "markov_", "confidence_head.")
"""Prefixes of names that only draft heads have."""
INDEXER = "self_attention.core_attention.indexer"
"""The indexer reads the output of the query norm, so sparse attention keeps the norms of latents separate."""
_UNFUSED = [
    (re.compile(rf"{re.escape(linear)}\.layer_norm_(weight|bias)$"), rf"{norm}.\1") for norm, linear in _FUSED_NORMS
]
_LAYER = re.compile(r"^decoder\.layers\.(?P<number>[0-9]{1,9})\.")
FINAL_NORM = re.compile(r"^decoder\.final_norm\.")
"""The final norm of a ``HybridModel``."""
_MAMBA = (
    (re.compile(r"^(decoder\.layers\.\d+)\.norm\."), r"\1.input_layernorm."),
    (re.compile(r"^(decoder\.layers\.\d+)\.mixer\."), r"\1.self_attention."),
    (re.compile(r"(\.self_attention\.conv1d)_(weight|bias)$"), r"\1.\2"),
)
"""Names in megatron-core's own Mamba-2 layer, with our names; the last ones are from 0.19."""
# megatron-core's SequentialMLP, and TEGroupedMLP, which numbers the tensors of one module
_EXPERTS = (
    re.compile(r"\.experts\.local_experts\.(?P<number>[0-9]{1,9})\.(?P<tensor>linear_fc[12]\.(?:weight|bias))$"),
    re.compile(r"\.experts\.(?P<tensor>linear_fc[12]\.(?:weight|bias))(?P<number>[0-9]{1,9})$"),
)
_STACKED = re.compile(r"(?<=\.experts\.)(?=linear_fc[12]\.adapter\.)")
"""Where the number of an expert is absent in the name of a factor that holds all experts of a layer."""
_MTP = re.compile(r"^mtp\.layers\.(?P<number>[0-9]{1,9})\.(?:mtp_model_layer(?:\.layers\.\d+)?(?=\.))?")
_EXPERT = re.compile(r"\.experts\.([0-9]{1,9})\.")


@dataclass(frozen=True, slots=True)
class Numbering:
    """Global numbers of a chunk's layers, of the experts that this rank holds in each layer, and of its MTP layers."""

    layers: tuple[int, ...]
    experts: tuple[int, ...] = ()
    mtp: tuple[int, ...] = ()


def canonical(name: str, numbering: Numbering) -> str:
    """The canonical name of a chunk's parameter."""
    name = _LAYER.sub(lambda match: f"decoder.layers.{numbering.layers[int(match[1])]}.", name)
    name = FINAL_NORM.sub("decoder.final_layernorm.", name)
    name = _MTP.sub(lambda match: _mtp_prefix(match, numbering), name)
    for pattern in _EXPERTS:
        name = pattern.sub(lambda match: _expert_tensor(match, numbering), name)
    name = plain_key(name)
    for pattern, plain in _MAMBA:
        name = pattern.sub(plain, name)
    return name


def canonical_names(name: str, numbering: Numbering) -> tuple[str, ...]:
    """The canonical names of a chunk's parameter: one, or one for each expert whose adapters are stacked in it.

    >>> canonical_names("decoder.layers.0.mlp.experts.linear_fc1.adapter.linear_in.weight", Numbering((4,), (6, 7)))[1]
    'decoder.layers.4.mlp.experts.7.linear_fc1.adapter.linear_in.weight'
    """
    own = canonical(name, numbering)
    if not is_stacked(own):
        return (own,)
    return tuple(_STACKED.sub(f"{expert}.", own) for expert in numbering.experts)


def is_stacked(name: str) -> bool:
    """Whether a chunk's parameter holds the adapters of all experts of a layer, by its name."""
    return _STACKED.search(name) is not None


def _expert_tensor(match: re.Match[str], numbering: Numbering) -> str:
    return f".experts.{numbering.experts[int(match['number'])]}.{match['tensor']}"


def global_name(name: str, numbering: Numbering) -> str:
    """The name of a chunk's parameter with the global numbers of its layer and expert, otherwise unchanged."""
    numbered = (
        (_LAYER, numbering.layers),
        (_MTP, numbering.mtp),
        *((pattern, numbering.experts) for pattern in _EXPERTS),
    )
    for pattern, numbers in numbered:
        if match := pattern.search(name):
            start, end = match.span("number")
            name = f"{name[:start]}{numbers[int(match['number'])]}{name[end:]}"
    return name


def plain_key(key: str) -> str:
    """A key of a checkpoint with the canonical names of norms.

    Which norms are fused into linear layers differs between backends, and between megatron-core's specs.
    """
    for pattern, plain in _UNFUSED:
        key = pattern.sub(plain, key)
    return key


def fused_norms(modules: Collection[str]) -> dict[str, str]:
    """Prefixes of norms in a layer, each with its prefix under TransformerEngine: the inverse of ``plain_key``.

    A norm that reads residual streams by its ``connection`` stays apart, and so do norms of latents with an indexer.

    Args:
        modules: the canonical names of the layer's modules, relative to the layer.
    """
    apart = "self_attention.linear_kv_up_proj", "self_attention.linear_q_up_proj"
    is_sparse = any(module.startswith(INDEXER) for module in modules)
    return {
        f"{norm}.": f"{linear}.layer_norm_"
        for norm, linear in _FUSED_NORMS
        if linear in modules and f"{norm}.connection" not in modules and not (is_sparse and linear in apart)
    }


def _mtp_prefix(match: re.Match[str], numbering: Numbering) -> str:
    """The inner layer is ``mtp_model_layer`` in megatron-core 0.19, and ``transformer_layer`` in earlier releases.

    In a ``HybridModel`` it is a stack of its halves, whose modules have different names.
    """
    inner = "transformer_layer" if "mtp_model_layer" in match[0] else ""
    return f"mtp.layers.{numbering.mtp[int(match[1])]}.{inner}"


def layer_of(name: str) -> int | None:
    """The layer number in a canonical name, if it has one."""
    match = _LAYER.match(name)
    return int(match[1]) if match else None


def mtp_layer_of(name: str) -> int | None:
    """The number of the MTP layer in a canonical name, if it has one."""
    match = _MTP.match(name)
    return int(match[1]) if match else None


def count_mtp_layers(names: Iterable[str]) -> int:
    """The number of different MTP layers in canonical names."""
    return len({mtp_layer_of(name) for name in names} - {None})


def expert_of(name: str) -> int | None:
    """The number of the routed expert in a canonical name, if it has one."""
    match = _EXPERT.search(name)
    return int(match[1]) if match else None


def kind_of(name: str) -> str:
    """A canonical name with ``*`` for the number of its expert, so that it is equal for all experts of a layer."""
    return _EXPERT.sub(".experts.*.", name)


def shift_expert(name: str, shift: int) -> str:
    """A canonical name with ``shift`` added to the number of its expert, if it has one."""
    return _EXPERT.sub(lambda match: f".experts.{int(match[1]) + shift}.", name)


def renumber_layer(name: str, layer: int) -> str:
    """A canonical name with another number for its decoder layer, if it has one."""
    return _LAYER.sub(f"decoder.layers.{layer}.", name)


_FUSED = re.compile(
    r"(.*)\.(?:[qkv]_proj|q_a_proj|kv_a_proj_with_mqa|in_proj_\w+|gate_proj|up_proj|w1|w3|c_fc_[01]"
    r"|(?<=\.indexer\.)(?:wk|weights_proj))\.(?:bias|weight\w*|\w*scale\w*)"
)
"""Projections of one input: of an attention, its indexer, a delta net, an MLP or an expert.

SGLang silently ignores latents (``q_a_proj`` and ``kv_a_proj_with_mqa``) if they come in two load calls. vLLM has one
parameter for ``wk`` and ``weights_proj`` of an indexer.
"""


def fused_module(name: str) -> str | None:
    """The module whose projections an engine fuses, with the HF tensor ``name`` among them; None if it fuses none.

    >>> fused_module("model.layers.3.self_attn.q_proj.weight"), fused_module("model.layers.3.self_attn.o_proj.weight")
    ('model.layers.3.self_attn', None)
    """
    match = _FUSED.fullmatch(name)
    return match[1] if match else None


def fused_norm(name: str, fused: Mapping[str, str]) -> str | None:
    """The name of a norm that TransformerEngine fuses; None for any other parameter.

    Args:
        fused: the ``fused_norms`` of its layer.
    """
    norm, dot, kind = name.rpartition(".")
    linear = fused.get(norm + dot)
    return None if linear is None else f"{linear}{kind}"


def local_expert(name: str, expert: int, local: int, *, grouped: bool) -> str:
    """The name of the parameter of a routed expert, by its number on this rank."""
    before, _, after = name.partition(f".experts.{expert}.")
    return f"{before}.experts.{after}{local}" if grouped else f"{before}.experts.local_experts.{local}.{after}"


def foreign_prefix(unexpected: Iterable[str], missing: Iterable[str]) -> str:
    """A hint if all unexpected names are names of the model behind one prefix, such as that of a wrapper; or "".

    >>> foreign_prefix(["module.lm_head.weight", "module.model.norm.weight"], ["model.norm.weight"])
    ". All names of the source begin with 'module.': remove this prefix"
    """
    names, wanted = [*unexpected], {*missing}
    cuts = ((name, cut + 1) for name in names for cut, char in enumerate(name) if char == ".")
    prefix = next((name[:cut] for name, cut in cuts if name[cut:] in wanted), "")
    if not prefix or not all(name.startswith(prefix) for name in names):
        return ""
    return f". All names of the source begin with {prefix!r}: remove this prefix"
