"""Where a chunk comes from: all that is needed to give its weights HF names."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, Union

from mcore_bridge.architecture import architecture_of, read_hf
from mcore_bridge.config.hf import find_folder
from mcore_bridge.weights.checkpoint import names_in
from mcore_bridge.weights.layout import REPLICATED, VOCAB
from mcore_bridge.weights.mapping import Rules, WeightMapping, fused, pattern_of, table

if TYPE_CHECKING:
    from transformers import PretrainedConfig

HF = Union[str, "os.PathLike[str]", "PretrainedConfig"]
"""A folder, a hub name in the local cache, or a config."""
Dialect = Literal["split", "fused"]
"""How HF holds the routed experts of a layer: one tensor for each, or one for all of them."""

# fmt: off
LM_HEAD    = table(("output_layer.weight", "lm_head.weight", VOCAB))
SCORE_HEAD = table(("output_layer.weight", "score.weight",   REPLICATED),
                   ("output_layer.bias",   "score.bias",     REPLICATED))
# fmt: on


@dataclass(frozen=True, slots=True)
class Provenance:
    """A model's HF config, the rules and ignored HF names of its architecture, its head, the folder it came from.

    ``dialect`` is that of the folder, or of the architecture where there is none.
    """

    hf: PretrainedConfig
    rules: Rules
    ignored: tuple[str, ...] = ()
    head: str = "lm"
    folder: str | None = None
    dialect: Dialect = "split"

    def mapping(self, *, tied: bool, mtp: bool = False, dialect: Dialect | None = None) -> WeightMapping:
        """All rules, head included.

        Args:
            tied: the output layer is the word embedding.
            mtp: MTP layers are built, and so their copies of embedding and head are written.
            dialect: of the HF names; None is the model's own.
        """
        rules = fused(self.rules) if (dialect or self.dialect) == "fused" else self.rules
        ignored = self.ignored
        if not mtp:
            ignored = (*ignored, *(name for rule in rules if rule.copy for name in rule.hf))
            rules = tuple(rule for rule in rules if not rule.copy)
        if self.head != "lm":
            # A causal LM has no score: its own head is left out, and ours stays as it was initialised.
            return WeightMapping((*rules, *SCORE_HEAD), (*ignored, "lm_head.weight"), ("score.*",))
        if tied:  # files may hold a redundant copy, which transformers ignores as well
            return WeightMapping((*rules, *tied_lm_head(rules)), (*ignored, "lm_head.weight"))
        return WeightMapping((*rules, *LM_HEAD), ignored)


def tied_lm_head(rules: Rules) -> Rules:
    """The output layer that is the word embedding again."""
    embedding = (rule for rule in rules if rule.mcore == "embedding.word_embeddings.weight" and not rule.copy)
    return tuple(replace(rule, mcore="output_layer.weight", exported=False) for rule in embedding)


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
    rules = architecture.rules(config)
    dialect = dialect_of(names_in(folder), rules) if folder else None
    return Provenance(config, rules, architecture.ignored, head, folder, dialect or architecture.dialect)


def dialect_of(names: Iterable[str], rules: Rules) -> Dialect | None:
    """The dialect that tells ``names`` from those of the other one, if they hold any routed experts."""
    split, whole = ({name for rule in each if rule.axis == "etp" for name in rule.hf} for each in (rules, fused(rules)))
    if split == whole:
        return None
    stacks = {name.removesuffix("[*]") for name in whole}
    patterns = set(map(pattern_of, names))
    return "fused" if patterns & stacks else "split" if patterns & split else None


def mapping(hf: HF, *, head: str = "lm", dialect: Dialect | None = None) -> WeightMapping:
    """The weight mapping of a model as a value: its rules, and what a checkpoint may hold besides, or lack."""
    found = provenance_of(hf, head=head)
    return found.mapping(tied=bool(found.hf.tie_word_embeddings), dialect=dialect)
