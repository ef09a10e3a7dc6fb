"""The text of families.md: the weights of each family, told by blocks that families share."""

import importlib
import pkgutil
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from types import ModuleType
from typing import TYPE_CHECKING

from mcore_bridge import models
from mcore_bridge import rules as algebra
from mcore_bridge.architecture import Architecture
from mcore_bridge.rules.layout import Chain, Layout
from mcore_bridge.rules.mapping import Rule, Rules, under
from mcore_bridge.rules.variants import fused

if TYPE_CHECKING:
    from transformers import PretrainedConfig

HEAD = """# Families and their weights

{overview}

## How to read what follows

Made from the registry by `docs/tools/make_families.py`; CI checks that it is up to date. [refused.md](refused.md) lists
the values that a config may not have. Each family is listed with its blocks, which are described below, and with
weights that are in no block. [design.md](../internals/design.md) explains layouts; `>>` composes them. `*` is the
number of a layer or an expert. `[*]` is the index of an expert inside one tensor for all experts. A config may switch
off norms and biases.

The output layer is not repeated: it is `lm_head.weight` (VOCAB), or the embedding if both are tied. Layers for
multi-token prediction (MTP) are `model.layers.*` in HF, numbered after the layers of the decoder, unless the family
says otherwise. The config decides which layers have a block.
"""
EXPERT_FORMATS = """Routed experts have two formats. `split` is one tensor per expert. `fused` is one tensor for all
experts of a layer, named `gate_up_proj` and `down_proj` in the module `experts`. Folders of either format can be read.
A family is listed with the format of its published checkpoints. A save without a source folder writes this format.
"""
PLACES = {
    "Once": ("", ""),
    "In each layer": ("decoder.layers.*", "model.layers.*"),
    "Around each layer of MTP": ("mtp.layers.*", "model.layers.*"),
    "In each layer of MTP": ("mtp.layers.*.transformer_layer", "model.layers.*"),
    "Around the layer of MTP, HF's `mtp`": ("mtp.layers.0", "mtp"),
    "In the layer of MTP, HF's `mtp.layers.*`": ("mtp.layers.*.transformer_layer", "mtp.layers.*"),
}
Told = tuple[dict[str, list[str]], Rules]
"""The names of blocks by their place, and the rules that are in no block."""
_WRITTEN = "a copy under another name: saves write it, loads compare it"
_READ = "another name, which loads accept and saves do not write"


def _constants(package: ModuleType, prefix: str) -> Iterator[tuple[str, object]]:
    """What the modules of ``package`` define in capitals whose names begin with ``prefix``."""
    for name in (module.name for module in pkgutil.iter_modules(package.__path__)):
        if name.startswith(prefix):
            module = importlib.import_module(f"{package.__name__}.{name}")
            yield from ((name, value) for name, value in vars(module).items() if name.isupper())


LAYOUTS = {name: value for name, value in _constants(algebra, "layout") if isinstance(value, Layout)}
BLOCKS: dict[str, Rules] = {
    name: value
    for name, value in _constants(models, "blocks")
    if isinstance(value, tuple) and value and all(isinstance(rule, Rule) for rule in value)
}


def page(families: Mapping[str, tuple[Architecture, str]], overview: str) -> str:
    """The text of the page, from the architectures and what each is; ``overview`` is the table of all."""
    rules = {name: architecture.rules(default_config(architecture)) for name, (architecture, _) in families.items()}
    told = {name: _told(each) for name, each in rules.items()}
    uses = Counter(block for used, _ in told.values() for block in {name for names in used.values() for name in names})
    lines = [HEAD.format(overview=overview), EXPERT_FORMATS]
    for name, (architecture, description) in families.items():
        lines += [f"## {name}", "", description, "", *_family(architecture, rules[name], told[name]), ""]
    return "\n".join([*lines, "## Blocks", "", *_blocks([name for name in sorted(BLOCKS) if uses[name]]), ""])


def _family(architecture: Architecture, rules: Rules, told: Told) -> Iterator[str]:
    if architecture.megatron_core is not None:
        yield f"- Needs megatron-core {architecture.megatron_core.version}: {architecture.megatron_core.reason}"
    used, own = told
    for place, names in used.items():
        yield f"- {place}: {quoted(names)}"
    if fused(rules) != rules:
        yield f"- Routed experts: `{architecture.expert_format}`"
    elif any(rule.axis == "etp" for rule in rules):
        yield "- Routed experts: always one tensor for all experts of a layer"
    if architecture.ignored:
        yield f"- Left unused when a checkpoint holds it: {quoted(architecture.ignored)}"
    if patterns := architecture.mtp(default_config(architecture)):
        yield f"- MTP layers that are not built, which a save copies: {quoted(patterns)}"
    if own:
        yield ""
        yield from _table(own)


def default_config(architecture: Architecture) -> "PretrainedConfig":
    """A default config, with a layer of multi-token prediction, so that what goes with one shows."""
    from transformers import CONFIG_MAPPING

    hf: PretrainedConfig = CONFIG_MAPPING[architecture.reads_as or architecture.model_type]()
    hf.num_nextn_predict_layers = 1
    return hf


def _told(rules: Rules) -> Told:
    """``rules`` by blocks: at each point the longest that they go on with."""
    used: dict[str, list[str]] = {}
    own: list[Rule] = []
    rest = tuple(rules)
    while rest:
        found = max(_starting(rest), key=lambda each: each[2], default=None)
        if found is None:
            own.append(rest[0])
            rest = rest[1:]
        else:
            place, name, length = found
            used.setdefault(place, []).append(name)
            rest = rest[length:]
    return used, tuple(own)


def _starting(rules: Rules) -> Iterator[tuple[str, str, int]]:
    """Place, name and length of each block with which ``rules`` begin."""
    plain = tuple(replace(rule, offset=0, count=None) for rule in rules)
    for name, block in BLOCKS.items():
        for place, prefixes in PLACES.items():
            placed = under(*prefixes, block) if any(prefixes) else block
            if plain[: len(placed)] == placed:
                yield place, name, len(placed)


def _blocks(names: list[str]) -> Iterator[str]:
    yield "| block | megatron-core | HF | layout |"
    yield "|---|---|---|---|"
    for name in names:
        for number, rule in enumerate(BLOCKS[name]):
            yield f"| {'' if number else f'`{name}`'} | {_cells(rule)} |"


def quoted(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _table(rules: Rules) -> Iterator[str]:
    yield "| megatron-core | HF | layout |"
    yield "|---|---|---|"
    for rule in rules:
        yield f"| {_cells(rule)} |"


def _cells(rule: Rule) -> str:
    notes = (
        *(("over etp",) if rule.axis == "etp" else ()),
        *((f"layer n is HF's {rule.stride}n{f' + {rule.offset}' * (rule.offset > 0)}",) if rule.stride > 1 else ()),
        *((_WRITTEN if rule.exported else _READ,) if rule.copy else ()),
    )
    return f"`{rule.mcore}` | {quoted(rule.hf)} | {', '.join((name_of(rule.layout), *notes))}"


def name_of(value: Layout) -> str:
    """The name of a layout, or the names of the longest layouts that it is a chain of."""
    named = {_steps(each): name for name, each in LAYOUTS.items()}
    names, rest = [], _steps(value)
    while rest:
        length = next((length for length in range(len(rest), 0, -1) if rest[:length] in named), 1)
        names.append(named.get(rest[:length], str(rest[0])))
        rest = rest[length:]
    return " >> ".join(names)


def _steps(value: Layout) -> tuple[Layout, ...]:
    return value.steps if isinstance(value, Chain) else (value,)
