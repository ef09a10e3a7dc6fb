"""Where a chunk comes from: all that is needed to give its weights HF names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mcore_bridge.weights.layout import REPLICATED, VOCAB
from mcore_bridge.weights.mapping import Rules, WeightMapping, table

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# fmt: off
LM_HEAD      = table(("output_layer.weight", "lm_head.weight",            VOCAB))
TIED_LM_HEAD = table(("output_layer.weight", "model.embed_tokens.weight", VOCAB), exported=False)
SCORE_HEAD   = table(("output_layer.weight", "score.weight",              REPLICATED),
                     ("output_layer.bias",   "score.bias",                REPLICATED))
# fmt: on


@dataclass(frozen=True, slots=True)
class Provenance:
    """HF config, the rules and ignored HF names of its architecture, the head, and the folder that a model came from."""

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
