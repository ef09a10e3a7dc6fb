"""The split of the pipeline: the layers of each stage, by megatron-core's rules.

One law always holds. In execution order (virtual stage by virtual stage, rank by rank), the layers of the stages make
up ``range(num_layers)``. The first stage holds the embedding, the last stage the loss. Settings with which
megatron-core would break this law are refused.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, groupby

from mcore_bridge.arguments import is_count
from mcore_bridge.errors import MeshError, shown

BALANCED = "balanced"
"""A layout that ``balanced()`` replaces by an explicit one, once the bytes of the layers are known."""
_LONGEST = 100_000
"""The largest number of layers and stages in a layout, far more than any model has."""
_LETTERS = {"embedding": "E", "decoder": "t", "mtp": "m", "loss": "L"}
"""megatron-core's letters of layers in a layout, by the names of their kinds."""
_GROUP = re.compile(r"\(([^)]+)\)\*(\d+)")


@dataclass(frozen=True, slots=True)
class Stage:
    """One chunk of the pipeline.

    Attributes:
        pp_rank: the pipeline rank that holds it.
        vp_stage: its index among that rank's chunks.
        layers: the global indices of its decoder layers, from 0; may be empty.
        embedding: whether it holds the input embedding.
        loss: whether it holds the final norm and the output layer.
        num_mtp_layers: the number of MTP layers that an explicit layout puts here.
    """

    pp_rank: int
    vp_stage: int
    layers: range
    embedding: bool
    loss: bool
    num_mtp_layers: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineSplit:
    """The split of a pipeline. ``ParallelDims`` has fields with these names, and explains them.

    Raises:
        MeshError: the combination is wrong for every model.
    """

    pp: int
    vp: int
    layout: str | None
    num_layers_in_first_pipeline_stage: int | None
    num_layers_in_last_pipeline_stage: int | None
    account_for_embedding_in_pipeline_split: bool
    account_for_loss_in_pipeline_split: bool

    def __post_init__(self) -> None:
        sizes = {
            "num_layers_in_first_pipeline_stage": self.num_layers_in_first_pipeline_stage,
            "num_layers_in_last_pipeline_stage": self.num_layers_in_last_pipeline_stage,
        }
        sizes = {name: size for name, size in sizes.items() if size is not None}
        accounts = self.account_for_embedding_in_pipeline_split or self.account_for_loss_in_pipeline_split
        for name, size in sizes.items():
            if not is_count(size):
                raise MeshError(
                    f"{name} must be an integer of at least 1, found {size!r}: a stage without layers needs a layout"
                )
            if self.pp == 1:
                raise MeshError(f"{name}={size} needs pp > 1: megatron-core would build only these layers at pp=1")
        if sizes and accounts:
            raise MeshError(
                f"{' and '.join(sizes)} and account_for_*_in_pipeline_split must not both be given: drop one of them"
            )
        if len(sizes) == 2 and self.pp == 2 and self.vp > 1:
            raise MeshError(
                "num_layers_in_first_pipeline_stage and num_layers_in_last_pipeline_stage must not both be given at "
                "pp=2 with vp > 1: megatron-core divides by zero. Give one, and the other follows from it"
            )
        if self.layout is None:
            return
        if sizes or accounts:
            raise MeshError(
                "layout already says where every layer goes: leave out num_layers_in_* and account_for_*, or the layout"
            )
        if self.layout != BALANCED:
            check_layout(self.layout, pp=self.pp, vp=self.vp)


@lru_cache(1024)
def stages_of(split: PipelineSplit, num_layers: int) -> tuple[Stage, ...]:
    """The stages of a model in execution order; see ``ParallelDims.stages``."""
    if num_layers < 1:
        raise MeshError(f"num_layers must be at least 1, found {num_layers}: correct the config")
    if split.layout == BALANCED:
        raise MeshError(
            'layout="balanced" is not resolved yet, so the stages are unknown: call '
            "mcore_bridge.config.mesh.balance.balanced(dims, layer_bytes=..., ...) first (build_model does)"
        )
    if split.layout is not None:
        return _place(split, *_explicit_counts(split, split.layout, num_layers))
    counts = _uneven_counts(split, num_layers) if _is_uneven(split) else _even_counts(split, num_layers)
    return _place(split, counts, [0] * len(counts))


def describe_stages(stages: tuple[Stage, ...]) -> str:
    """Layer counts in execution order, with equal neighbours written once: ``E2|(2|)*14|2L``."""
    cells = [f"{'E' * s.embedding}{len(s.layers)}{'m' * s.num_mtp_layers}{'L' * s.loss}" for s in stages]
    runs = [(cell, len(list(run))) for cell, run in groupby(cells)]
    return "|".join(cell if num == 1 else f"({cell})*{num}" for cell, num in runs)


def check_layout(layout: str, *, pp: int, vp: int) -> None:
    """Checks of a layout that need no model: it parses, and has one stage for each chunk of each pipeline rank.

    Raises:
        MeshError: the layout is wrong; the message says how.
    """
    stages = parse_layout(layout)
    if len(stages) != pp * vp:
        raise MeshError(
            f"layout {layout!r} must have pp * vp = {pp} * {vp} = {pp * vp} stages, found {len(stages)}: separate them "
            "by '|', virtual stage by virtual stage"
        )
    flat = "".join(stages)
    if not stages[0].startswith("E") or flat.count("E") != 1:
        raise MeshError(
            f"layout {layout!r} must have exactly one 'E', at the very start: the embedding is on stage 0 only"
        )
    if not stages[-1].endswith("L") or flat.count("L") != 1:
        raise MeshError(
            f"layout {layout!r} must have exactly one 'L', at the very end: the last stage computes the loss"
        )


def layout_text(layout: object) -> str | None:
    """Convert a layout of any kind that megatron-core takes to text: text, the layers of each stage, or its own object.

    ``[["embedding", "decoder"], ["decoder", "loss"]]`` --> ``"Et|tL"``.

    Raises:
        MeshError: ``layout`` has another type.
    """
    layout = getattr(layout, "input_data", layout)  # what megatron-core's object was made from
    if layout is None or isinstance(layout, str):
        return layout
    try:
        return "|".join("".join(_LETTERS[_name(layer)] for layer in stage) for stage in layout)  # type: ignore[attr-defined]
    except (KeyError, TypeError) as error:
        raise MeshError(
            f"layout must be text such as 'Ett|ttL', or a list of the layers of each stage ({', '.join(_LETTERS)}), "
            f"found {shown(layout)}: write it so, or leave it out"
        ) from error


def _name(layer: object) -> str:
    """The name of a kind of layer, in megatron-core's form, from text in any case or from a ``LayerType``."""
    return str(getattr(layer, "name", layer)).strip().lower()


def parse_layout(layout: str) -> list[str]:
    """The stages of a layout, by megatron-core's own parser: ``"Et*2|(t|)*2L"`` --> ``["Ett", "t", "t", "L"]``."""
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

    try:
        length = _unrolled_length(layout)
        rows = PipelineParallelLayerLayout.parse_str_to_list(layout) if length <= _LONGEST else []
    except (AssertionError, KeyError, ValueError) as error:
        raise MeshError(
            f"layout {layout!r} cannot be read by megatron-core: {error}. Expected stages of E, t, m, L with '|' "
            "between them, where '(..)*n' and 'x*n' repeat and commas are ignored; or 'balanced'"
        ) from error
    if length > _LONGEST:
        raise MeshError(
            f"layout {layout!r} must have at most {_LONGEST} layers and stages, found {length}: correct a number after "
            "'*'"
        )
    return ["".join(_LETTERS[kind.name] for kind in row) for row in rows]


def _unrolled_length(layout: str) -> int:
    """The length of a layout after unrolling. megatron-core's parser has no limit, and could use up all memory."""

    def length(text: str) -> int:
        return sum(int(times or 1) for times in re.findall(r".(?:\*(\d+))?", text))

    layout = layout.replace(",", "")
    inside = sum(length(group) * int(times) for group, times in _GROUP.findall(layout))
    return inside + length(_GROUP.sub("", layout))


def _explicit_counts(split: PipelineSplit, layout: str, num_layers: int) -> tuple[list[int], list[int]]:
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

    stages = parse_layout(layout)
    counts, mtp = [stage.count("t") for stage in stages], [stage.count("m") for stage in stages]
    if sum(counts) != num_layers:
        raise MeshError(
            f"layout {layout!r} must place the num_layers={num_layers} layers of the model ('t'), found {sum(counts)}: "
            "add or remove 't'"
        )
    try:
        PipelineParallelLayerLayout(layout, split.pp).validate_layer_layout(num_layers, sum(mtp) or None)
    except (AssertionError, NotImplementedError) as error:
        raise MeshError(f"megatron-core refuses the layout {layout!r}: {error}") from error
    return counts, mtp


def _is_uneven(split: PipelineSplit) -> bool:
    return split.num_layers_in_first_pipeline_stage is not None or split.num_layers_in_last_pipeline_stage is not None


def _even_counts(split: PipelineSplit, num_layers: int) -> list[int]:
    embedding, loss = split.account_for_embedding_in_pipeline_split, split.account_for_loss_in_pipeline_split
    num_items, num_chunks = num_layers + embedding + loss, split.pp * split.vp
    if num_items % num_chunks:
        counted = " (embedding and loss counted as account_for_*_in_pipeline_split says)" if embedding or loss else ""
        raise MeshError(
            f"{num_items} layers{counted} do not divide into pp * vp = {split.pp} * {split.vp} equal stages: use "
            'layout="balanced", or an explicit layout'
        )
    counts = [num_items // num_chunks] * num_chunks
    counts[0] -= embedding
    counts[-1] -= loss
    return counts


def _uneven_counts(split: PipelineSplit, num_layers: int) -> list[int]:
    first, last = split.num_layers_in_first_pipeline_stage, split.num_layers_in_last_pipeline_stage
    num_middle = split.pp - (first is not None) - (last is not None)
    left = num_layers - (first or 0) - (last or 0)
    given = f"num_layers_in_first_pipeline_stage={first}, num_layers_in_last_pipeline_stage={last}"
    if left < 0 or (num_middle == 0) != (left == 0):
        raise MeshError(
            f"{given} of num_layers={num_layers} leave {left} layers for {num_middle} other pipeline ranks: change "
            'them or use layout="balanced"'
        )
    if num_middle and left % num_middle:
        raise MeshError(
            f"{given} leave {left} layers, which {num_middle} other pipeline ranks cannot share equally: "
            'change them or use layout="balanced"'
        )
    middle = [left // num_middle] * num_middle if num_middle else []
    per_rank = [*([] if first is None else [first]), *middle, *([] if last is None else [last])]
    for pp_rank, count in enumerate(per_rank):
        if count % split.vp:
            raise MeshError(
                f"{given}: the {count} layers of pipeline rank {pp_rank} do not divide into vp={split.vp} chunks: "
                'change them or use layout="balanced"'
            )
    return [count // split.vp for count in per_rank] * split.vp


def _place(split: PipelineSplit, counts: list[int], mtp: list[int]) -> tuple[Stage, ...]:
    ends = list(accumulate(counts))
    last = len(counts) - 1
    return tuple(
        Stage(i % split.pp, i // split.pp, range(end - counts[i], end), i == 0, i == last, mtp[i])
        for i, end in enumerate(ends)
    )
