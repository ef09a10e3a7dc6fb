"""Where a chunk comes from: all that is needed to give its weights HF names."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Union

from mcore_bridge.architecture import architecture_of, read_hf
from mcore_bridge.config.hf import find_folder
from mcore_bridge.weights.layout import REPLICATED, VOCAB
from mcore_bridge.weights.mapping import Rules, WeightMapping, table

if TYPE_CHECKING:
    from transformers import PretrainedConfig

HF = Union[str, "os.PathLike[str]", "PretrainedConfig"]
"""A folder, a hub name in the local cache, or a config."""

# fmt: off
LM_HEAD      = table(("output_layer.weight", "lm_head.weight",            VOCAB))
TIED_LM_HEAD = table(("output_layer.weight", "model.embed_tokens.weight", VOCAB), exported=False)
SCORE_HEAD   = table(("output_layer.weight", "score.weight",              REPLICATED),
                     ("output_layer.bias",   "score.bias",                REPLICATED))
# fmt: on


@dataclass(frozen=True, slots=True)
class Provenance:
    """A model's HF config, the rules and ignored HF names of its architecture, its head, the folder it came from."""

    hf: PretrainedConfig
    rules: Rules
    ignored: tuple[str, ...] = ()
    head: str = "lm"
    folder: str | None = None

    def mapping(self, *, tied: bool) -> WeightMapping:
        """All rules, head included. ``tied``: the output layer is the word embedding."""
        if self.head != "lm":
            # A causal LM has no score: its own head is left out, and ours stays as it was initialised.
            return WeightMapping((*self.rules, *SCORE_HEAD), (*self.ignored, "lm_head.weight"), ("score.*",))
        if tied:  # files may hold a redundant copy, which transformers ignores as well
            return WeightMapping((*self.rules, *TIED_LM_HEAD), (*self.ignored, "lm_head.weight"))
        return WeightMapping((*self.rules, *LM_HEAD), self.ignored)


def provenance_of(hf: HF, *, head: str = "lm") -> Provenance:
    """All that gives a model its HF names, from its HF config.

    Args:
        hf: a folder, a hub name in the local cache, or a ``PretrainedConfig``.

    Raises:
        ConfigError: when it is no config, or of an architecture that is not registered.
    """
    config = read_hf(hf)
    architecture = architecture_of(config)
    folder = os.fspath(find_folder(hf)) if isinstance(hf, str | os.PathLike) else None
    return Provenance(config, architecture.rules(config), architecture.ignored, head, folder)


def mapping(hf: HF, *, head: str = "lm") -> WeightMapping:
    """The weight mapping of a model as a value: its rules, and what a checkpoint may hold besides, or lack."""
    found = provenance_of(hf, head=head)
    return found.mapping(tied=bool(found.hf.tie_word_embeddings))
