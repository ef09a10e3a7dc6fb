"""Configs of draft heads for speculative decoding: the fields that only a draft head has.

A published draft head has the ``model_type`` of another family, and two vocabularies: ``vocab_size`` is the one of its
policy, and ``draft_vocab_size`` its own. In memory ``vocab_size`` is its own, as for every model that we build, and
``target_vocab_size`` is the one of its policy. A save writes the published names again.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, TypeGuard

from mcore_bridge.arguments import is_whole
from mcore_bridge.config.fields import Derive, Hf, Mcore, count
from mcore_bridge.errors import ConfigError, shown

EAGLE3, DFLASH, DSPARK = "eagle3", "dflash", "dspark"
"""The ``model_type`` of a head in memory."""
EMBEDDING, MAP = "embed_tokens.weight", "d2t"
"""Tensors that a draft head may lack: its embedding is then the one of its policy, and both vocabularies are equal."""
_INPUTS, _OUTPUTS, _BLOCKS = "eagle_aux_hidden_state_layer_ids", "eagle_config", "dflash_config"
_INNER = ("mask_token_id", "target_layer_ids")
_CONFIDENCE = ("enable_confidence_head", "confidence_head_with_markov")
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

    ``fading`` is the number of tokens after which weights in a block fall to 1/e, as SpecForge trains.

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
    fading: ClassVar[float] = 7.0

    @property
    def num_drafted(self) -> int:
        """How many tokens a block drafts: those at its masks."""
        return self.block_size - 1

    def layers_read(self, num_layers: int) -> tuple[int, ...]:
        """See ``rising``. The output of the last layer is not among them."""
        return rising(self.layers, num_layers, "target_layer_ids")


@dataclass(frozen=True, slots=True)
class MarkovFields(BlockFields):
    """What a DSpark head has: also tables of tokens that follow each other, and perhaps a confidence head.

    Attributes:
        markov_rank: the width of the tables.
        enable_confidence_head: whether it predicts for each token the probability that an engine accepts it.
        confidence_head_with_markov: whether this head also reads the first table.
    """

    markov_rank: int
    enable_confidence_head: bool = False
    confidence_head_with_markov: bool = False
    fading: ClassVar[float] = 4.0

    @property
    def num_drafted(self) -> int:
        """How many tokens a block drafts: at the known first one, too."""
        return self.block_size


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
    if model_type != EAGLE3:
        return {**(_flat(published) if model_type == DSPARK else published), "model_type": model_type}
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


def _are_whole(numbers: object) -> TypeGuard[Sequence[int]]:
    return isinstance(numbers, list | tuple) and all(map(is_whole, numbers))


def _layers(hf: Hf) -> tuple[int, ...] | None:
    """The layers whose inputs are read. vLLM's field has these, and SGLang's the layers whose outputs are read."""
    inner = hf.get(_OUTPUTS) or {}
    if not isinstance(inner, Mapping) or any(inner.get(name, value) is not value for name, value in _AS_BUILT.items()):
        raise ConfigError(f"{_OUTPUTS} must have {_AS_BUILT}, found {shown(inner)}: nobody has written the others.")
    if unknown := sorted(inner.keys() - _AS_BUILT.keys() - {_INPUTS}):
        raise ConfigError(f"{_OUTPUTS} must have known keys, found {unknown}: they may change what is computed.")
    inputs, outputs = hf.get(_INPUTS), inner.get(_INPUTS)
    if not all(layers is None or _are_whole(layers) for layers in (inputs, outputs)):
        raise ConfigError(f"{_INPUTS} must be a list of whole numbers, found {shown(inputs)} and {shown(outputs)}.")
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


def _flat(published: Mapping[str, object]) -> dict[str, object]:
    """The fields of a DSpark head by the names that engines read. SpecForge has some of them in ``dflash_config``."""
    inner = published.get(_BLOCKS) or {}
    if not isinstance(inner, Mapping) or any(published.get(name, value) != value for name, value in inner.items()):
        raise ConfigError(
            f"{_BLOCKS} must have the values of fields of the config with the same names, found {shown(inner)}. "
            "Correct the value that is wrong: engines read the field outside."
        )
    outside = {name: value for name, value in published.items() if name != _BLOCKS}
    return {"markov_head_type": "vanilla", **dict.fromkeys(_CONFIDENCE, False), **outside, **inner}


def _of_blocks(hf: Hf, inner: Hf) -> tuple[int, int, tuple[int, ...], int, int]:
    """The values of ``BlockFields``; ``inner`` has those that a DFlash head has in ``dflash_config``."""
    ids, mask, vocab = inner.get("target_layer_ids"), inner.get("mask_token_id"), count(hf, "vocab_size")
    if not _are_whole(ids):
        raise ConfigError(f"target_layer_ids must be a list of whole numbers, found {shown(ids)}.")
    if not is_whole(mask) or not 0 <= mask < vocab:
        raise ConfigError(f"mask_token_id must be a token below {vocab}, found {shown(mask)}.")
    width = "target_hidden_size" if hf.get("target_hidden_size") is not None else "hidden_size"
    return vocab, count(hf, width), tuple(layer + 1 for layer in ids), count(hf, "block_size"), mask


def _block_forward(hf: Hf) -> dict[str, object]:
    inner = hf.get(_BLOCKS)
    if not isinstance(inner, Mapping) or inner.keys() != {*_INNER}:
        raise ConfigError(
            f"{_BLOCKS} must have {' and '.join(_INNER)}, and nothing else, found {shown(inner)}: nobody has written "
            "DFlash heads with windows, nor Domino heads, whose loss changes with the number of steps so far. A DSpark "
            "head must have the class Qwen3DSparkModel."
        )
    draft = BlockFields(*_of_blocks(hf, inner))
    if not draft.num_drafted:
        raise ConfigError("block_size must be at least 2, found 1: a DFlash head drafts all tokens of a block but one.")
    return {"draft": draft}


def _block_backward(mcore: Mcore) -> dict[str, object]:
    fields = _written(mcore["draft"])
    return {_BLOCKS: {name: fields.pop(name) for name in _INNER}, **fields}


def _written(draft: object) -> dict[str, object]:
    assert isinstance(draft, BlockFields)
    fields = {name: getattr(draft, name) for name in ("target_hidden_size", "block_size", "mask_token_id")}
    return fields | {"target_layer_ids": [layer - 1 for layer in draft.layers]}


BLOCK_DRAFT = Derive(("target_hidden_size", "block_size", _BLOCKS), _block_forward, _block_backward)


def _markov_forward(hf: Hf) -> dict[str, object]:
    confidence = {name: hf[name] for name in _CONFIDENCE}
    for name, value in confidence.items():
        if not isinstance(value, bool):
            raise ConfigError(f"{name} must be true or false, found {shown(value)}.")
    return {"draft": MarkovFields(*_of_blocks(hf, hf), count(hf, "markov_rank"), **confidence)}  # type: ignore[arg-type]


def _markov_backward(mcore: Mcore) -> dict[str, object]:
    draft = mcore["draft"]
    return _written(draft) | {name: getattr(draft, name) for name in ("markov_rank", *_CONFIDENCE)}


MARKOV_DRAFT = Derive(
    ("target_hidden_size", "block_size", *_INNER, "markov_rank", *_CONFIDENCE), _markov_forward, _markov_backward
)


def _one_layer(hf: Hf) -> dict[str, object]:
    if (number := count(hf, "num_hidden_layers")) != 1:
        raise ConfigError(
            f"num_hidden_layers must be 1, found {number}: nobody has written further layers of a draft head."
        )
    return {"num_layers": 1}


ONE_LAYER = Derive(("num_hidden_layers",), _one_layer, lambda mcore: {"num_hidden_layers": mcore["num_layers"]})
