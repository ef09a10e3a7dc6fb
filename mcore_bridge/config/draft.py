"""Configs of draft heads for speculative decoding: the fields that only a draft head has.

A published draft head has the ``model_type`` of another family, and two vocabularies: ``vocab_size`` is the one of its
policy, and ``draft_vocab_size`` its own. In memory ``vocab_size`` is its own, as for every model that we build, and
``target_vocab_size`` is the one of its policy. A save writes the published names again.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from mcore_bridge.config.fields import Derive, Hf, Mcore, count
from mcore_bridge.errors import ConfigError, shown

EAGLE3, DFLASH = "eagle3", "dflash"
"""The ``model_type`` of a head in memory."""
EMBEDDING, MAP = "embed_tokens.weight", "d2t"
"""Tensors that a draft head may lack: its embedding is then the one of its policy, and both vocabularies are equal."""
_INPUTS, _OUTPUTS, _BLOCKS = "eagle_aux_hidden_state_layer_ids", "eagle_config", "dflash_config"
_FLAGS = ("norm_before_residual", "fc_norm", "own_embedding", "has_map")
_AS_BUILT = {
    "use_aux_hidden_state": True,
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
}
"""Keys of ``eagle_config``, each with the value of the module that we build."""


def rising(layers: Sequence[int], num_layers: int, field: str) -> tuple[int, ...]:
    """The layers whose inputs a head reads, of a policy with this number of layers.

    Raises:
        ConfigError: the policy lacks one of them, or they do not rise.
    """
    if not layers or [*layers] != sorted({*layers}) or layers[0] < 0 or layers[-1] >= num_layers:
        raise ConfigError(
            f"A draft head must read the inputs of layers of its policy, in rising order and below {num_layers}, found "
            f"{[*layers]}. Set {field} in its config; engines read it, too."
        )
    return tuple(layers)


@dataclass(frozen=True, slots=True)
class BlockFields:
    """What a DFlash head has beside the fields of a decoder. It has neither an embedding nor an output layer.

    Attributes:
        target_vocab_size: the vocabulary of its policy, and its own.
        target_hidden_size: the width of the hidden states of its policy.
        layers: the layers of the policy whose *inputs* it reads, counted from 0: one more than ``target_layer_ids``.
        block_size: how many tokens a block has, the known first one included.
        mask_token_id: the token that stands at the unknown places of a block.
    """

    target_vocab_size: int
    target_hidden_size: int
    layers: tuple[int, ...]
    block_size: int
    mask_token_id: int
    own_embedding: ClassVar[bool] = False
    has_map: ClassVar[bool] = False

    def layers_read(self, num_layers: int) -> tuple[int, ...]:
        """See ``rising``. The output of the last layer is not among them."""
        return rising(self.layers, num_layers, _BLOCKS)


@dataclass(frozen=True, slots=True)
class DraftFields:
    """What an EAGLE3 head has beside the fields of a decoder.

    Attributes:
        target_vocab_size: the vocabulary of its policy.
        target_hidden_size: the width of the hidden states of its policy, of which it reads three.
        norm_before_residual: whether the residual of its layer is the normed hidden state.
        fc_norm: whether each of the three hidden states has a norm.
        layers: the layers of the policy whose *inputs* it reads, counted from 0. None: three of them by the rule of
            ``layers_read``.
        own_embedding: whether it has an embedding, and does not use the one of its policy.
        has_map: whether it has ``d2t`` and ``t2d``, which join both vocabularies.
    """

    target_vocab_size: int
    target_hidden_size: int
    norm_before_residual: bool = False
    fc_norm: bool = False
    layers: tuple[int, ...] | None = None
    own_embedding: bool = False
    has_map: bool = True

    def layers_read(self, num_layers: int) -> tuple[int, ...]:
        """The three layers whose inputs the head reads, as ``rising``."""
        layers = (2, num_layers // 2, num_layers - 3) if self.layers is None else self.layers
        if len(layers) != 3:
            raise ConfigError(f"An EAGLE3 head must read three layers, found {[*layers]}. Correct {_INPUTS}.")
        return rising(layers, num_layers, _INPUTS)


def in_memory(
    model_type: str, published: Mapping[str, object], names: Collection[str] | None = None
) -> dict[str, object]:
    """The fields of a published config of a head, by their names in memory.

    Args:
        model_type: the kind of head.
        published: the fields of its config.json.
        names: the HF names of its tensors. None: as a saved config says. A new head uses the embedding of its policy,
            and has a map if its vocabulary is smaller.
    """
    if model_type == DFLASH:
        return {**published, "model_type": DFLASH}
    fields = {name: value for name, value in published.items() if name != "draft_vocab_size"}
    whole = fields.get("vocab_size")
    own = whole if (own := published.get("draft_vocab_size")) is None else own
    new = {"own_embedding": fields.get("own_embedding", False), "has_map": fields.get("has_map", own != whole)}
    has = new if names is None else {"own_embedding": EMBEDDING in names, "has_map": MAP in names}
    return {**fields, "model_type": EAGLE3, "vocab_size": own, "target_vocab_size": whole, **has}


def _forward(hf: Hf) -> dict[str, object]:
    flags = {name: hf.get(name, False) for name in _FLAGS}
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise ConfigError(f"{name} must be true or false, found {shown(value)}.")
    width = "target_hidden_size" if hf.get("target_hidden_size") is not None else "hidden_size"
    draft = DraftFields(count(hf, "target_vocab_size"), count(hf, width), layers=_layers(hf), **flags)  # type: ignore[arg-type]
    own = count(hf, "vocab_size")
    if own > draft.target_vocab_size or (own < draft.target_vocab_size and not draft.has_map):
        raise ConfigError(
            f"draft_vocab_size must be at most vocab_size, and equal to it without a tensor {MAP}, found {own} and "
            f"{draft.target_vocab_size}. Correct the config, or take the folder whose weights have {MAP}."
        )
    return {"draft": draft}


def _layers(hf: Hf) -> tuple[int, ...] | None:
    """The layers whose inputs are read. vLLM's field has these, and SGLang's the layers whose outputs are read."""
    inner = hf.get(_OUTPUTS) or {}
    if not isinstance(inner, Mapping) or any(inner.get(name, value) is not value for name, value in _AS_BUILT.items()):
        raise ConfigError(f"{_OUTPUTS} must have {_AS_BUILT}, found {shown(inner)}: nobody has written the others.")
    if unknown := sorted(inner.keys() - _AS_BUILT.keys() - {_INPUTS}):
        raise ConfigError(f"{_OUTPUTS} must have known keys, found {unknown}: they may change what is computed.")
    inputs, outputs = hf.get(_INPUTS), inner.get(_INPUTS)
    if not all(isinstance(layers, list | tuple | None) for layers in (inputs, outputs)):
        raise ConfigError(f"{_INPUTS} must be a list of numbers, found {shown(inputs)} and {shown(outputs)}.")
    shifted = None if outputs is None else tuple(layer + 1 for layer in outputs)
    layers = shifted if inputs is None else tuple(inputs)  # type: ignore[arg-type]
    if shifted is not None and layers != shifted:
        raise ConfigError(
            f"{_INPUTS} must be one more than in {_OUTPUTS}, where SGLang reads the layers whose outputs are meant; "
            f"vLLM reads the layers whose inputs are meant. Found {shown(inputs)} and {shown(outputs)}."
        )
    return layers


def _backward(mcore: Mcore) -> dict[str, object]:
    draft = mcore["draft"]
    assert isinstance(draft, DraftFields)
    return {
        "target_vocab_size": draft.target_vocab_size,
        "target_hidden_size": draft.target_hidden_size,
        **{name: getattr(draft, name) for name in _FLAGS},
    }


DRAFT = Derive(
    (
        *("target_vocab_size", "target_hidden_size", *_FLAGS),
        *(_INPUTS, _OUTPUTS),
    ),
    _forward,
    _backward,
)


def _block_forward(hf: Hf) -> dict[str, object]:
    inner = hf.get(_BLOCKS)
    if not isinstance(inner, Mapping) or inner.keys() != {"mask_token_id", "target_layer_ids"}:
        raise ConfigError(
            f"{_BLOCKS} must have mask_token_id and target_layer_ids, and nothing else, found {shown(inner)}: nobody "
            "has written heads that also have a window, or that predict tokens one after the other (Domino, DSpark)."
        )
    ids, mask, vocab = inner["target_layer_ids"], inner["mask_token_id"], count(hf, "vocab_size")
    if not isinstance(ids, list | tuple) or not all(isinstance(layer, int) for layer in ids):
        raise ConfigError(f"target_layer_ids must be a list of numbers, found {shown(ids)}.")
    if not isinstance(mask, int) or not 0 <= mask < vocab:
        raise ConfigError(f"mask_token_id must be a token below {vocab}, found {shown(mask)}.")
    width = "target_hidden_size" if hf.get("target_hidden_size") is not None else "hidden_size"
    layers = tuple(layer + 1 for layer in ids)
    return {"draft": BlockFields(vocab, count(hf, width), layers, count(hf, "block_size"), mask)}


def _block_backward(mcore: Mcore) -> dict[str, object]:
    draft = mcore["draft"]
    assert isinstance(draft, BlockFields)
    ids = [layer - 1 for layer in draft.layers]
    return {
        "target_hidden_size": draft.target_hidden_size,
        "block_size": draft.block_size,
        _BLOCKS: {"mask_token_id": draft.mask_token_id, "target_layer_ids": ids},
    }


BLOCK_DRAFT = Derive(("target_hidden_size", "block_size", _BLOCKS), _block_forward, _block_backward)


def _one_layer(hf: Hf) -> dict[str, object]:
    if (number := count(hf, "num_hidden_layers")) != 1:
        raise ConfigError(
            f"num_hidden_layers must be 1, found {number}: nobody has written further layers of a draft head."
        )
    return {"num_layers": 1}


ONE_LAYER = Derive(("num_hidden_layers",), _one_layer, lambda mcore: {"num_hidden_layers": mcore["num_layers"]})
