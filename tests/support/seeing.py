"""Batches with images for small composites, what transformers makes of them, and steps of training on a mesh."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import mcore_bridge as mb
from tests.support import composites as tiny
from tests.support import stepping

SPECIAL = {
    "image_token_id": 5,
    "image_token_index": 5,
    "video_token_id": 6,
    "video_token_index": 6,
    "vision_start_token_id": 7,
    "vision_end_token_id": 8,
}
"""Ids inside the vocabulary of the zoo's texts, in the place of published ones."""
FIRST, LAST = 10, 60
"""Ids of text."""


def config(model_type: str, **text: Any) -> Any:
    """A small config of a composite with ``SPECIAL`` tokens."""
    hf = tiny.config(model_type, **text)
    for name in SPECIAL.keys() & hf.to_dict().keys():
        setattr(hf, name, SPECIAL[name])
    if hasattr(hf.vision_config, "window_size"):
        hf.vision_config.window_size = 56  # two by two features
    if hasattr(hf.vision_config, "deepstack_visual_indexes"):
        hf.vision_config.depth, hf.vision_config.deepstack_visual_indexes = 3, [1, 2]
    return hf


def written(model_type: str, folder: Path, **text: Any) -> Path:
    """Write a random composite as transformers writes it."""
    torch.manual_seed(0)
    model = tiny.model_class(model_type)(config(model_type, **text)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.2)
    model.save_pretrained(folder)
    return folder


def reference(folder: Path) -> Any:
    """transformers' model in fp32."""
    from transformers import AutoConfig

    model_class = tiny.model_class(AutoConfig.from_pretrained(folder).model_type)
    return model_class.from_pretrained(folder, dtype=torch.float32).eval()


Grid = tuple[int, int, int]
ROWS: list[list[int | Grid | tuple[str, Grid]]] = [
    [3, (1, 4, 4), 4, (1, 2, 6), 5],
    [14],
    [2, ("video", (2, 4, 2)), 6, (1, 2, 2), 3],
    [1, (1, 4, 2), 9],
]
"""Of each row, numbers of tokens of text, and grids of patches. The second row is of text."""


def batch_of(hf: Any, layout: Any = None) -> tuple[Tensor, Tensor, list[dict[str, Tensor] | None]]:
    """Ids and mask ``[rows, seq]``, and images by row: of Qwen's kind. Rows are padded on both sides."""
    generator = torch.Generator().manual_seed(5)
    vision = hf.vision_config
    merged, size = vision.spatial_merge_size**2, vision.temporal_patch_size * vision.patch_size**2 * 3
    rows, images = [], []
    for parts in ROWS if layout is None else layout:
        ids: list[int] = []
        inputs: dict[str, list[Any]] = {}
        for part in parts:
            if isinstance(part, int):
                ids += torch.randint(FIRST, LAST, (part,), generator=generator).tolist()
                continue
            is_video = isinstance(part[0], str)
            grid: Any = part[1] if is_video else part
            pixels, grids, token = _NAMES[is_video]
            frames, tokens = grid[0], grid[1] * grid[2] // merged
            apart = hf.model_type.startswith("qwen3")  # with a timestamp between frames
            for count in [tokens] * frames if apart else [tokens * frames]:
                ids += [SPECIAL["vision_start_token_id"], *[SPECIAL[token]] * count, 9]
            values = torch.randn(frames * grid[1] * grid[2], size, generator=generator)
            inputs.setdefault(pixels, []).append(values)
            inputs.setdefault(grids, []).append(torch.tensor([grid]))
        rows.append(ids)
        images.append({name: torch.cat(values) for name, values in inputs.items()} or None)
    seq = max(map(len, rows)) + 2
    ids, mask = torch.zeros(len(rows), seq, dtype=torch.int64), torch.zeros(len(rows), seq, dtype=torch.int64)
    for number, row in enumerate(rows):
        at = slice(number % 3, number % 3 + len(row))
        ids[number, at], mask[number, at] = torch.tensor(row), 1
    return ids, mask, images


_NAMES = {
    False: ("pixel_values", "image_grid_thw", "image_token_id"),
    True: ("pixel_values_videos", "video_grid_thw", "video_token_id"),
}


def expected(model: Any, ids: Tensor, mask: Tensor, images: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """transformers' log-probs ``[rows, seq]``, and the gradients of the tower for the loss of ``step``."""
    from mcore_bridge.batches.images import joined

    types = sum(kind * (ids == SPECIAL[name]) for kind, (_, _, name) in enumerate(_NAMES.values(), 1))
    logits = model(input_ids=ids, attention_mask=mask, mm_token_type_ids=types, **joined(images)).logits.float()
    log_probs = torch.zeros(ids.shape)
    for row, shown in enumerate(mask.bool()):
        own = logits[row, shown][:-1].log_softmax(-1).gather(-1, ids[row, shown][1:, None])[:, 0]
        log_probs = log_probs.index_put((torch.tensor(row), shown.nonzero()[1:, 0]), own)
    model.zero_grad()
    loss(log_probs, range(len(ids))).backward()
    tower = {
        name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
        for name, parameter in model.model.named_parameters()
        if not name.startswith("language_model.")
    }
    return log_probs.detach(), tower


def loss(log_probs: Tensor, rows: Any) -> Tensor:
    """The mean over rows of weighted sums: an equal part for each row."""
    weights = torch.randn(8, log_probs.size(1), generator=torch.Generator().manual_seed(9))[list(rows)]
    return (log_probs * weights).sum(1).mean()


def built(folder: Path, dims: mb.ParallelDims, **options: Any) -> list[Any]:
    """This rank's chunks in fp32, with a tower that is trained."""
    return mb.build_model(folder, dims=dims, dtype=torch.float32, device="cpu", vision="train", **options)


def step(
    folder: Path, sizes: dict[str, Any], batch: Any, *, overlap: bool = False, packed: bool = True, **options: Any
) -> dict[str, Any]:
    """Runs in each worker: log-probs of its share of the rows, and the tower's gradients before a mean over TP."""
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads

    dims = mb.ParallelDims(**sizes)
    with stepping.mesh(dims):
        chunks = built(folder, dims, **options)
        tower = dict(chunks[0].vision.named_parameters()) if hasattr(chunks[0], "vision") else {}
        for parameter in tower.values():
            parameter.average_gradients_across_tp_domain = False
        settings = DistributedDataParallelConfig(grad_reduce_in_fp32=True, overlap_grad_reduce=overlap)
        wrapped = [DistributedDataParallel(chunk.config, settings, chunk) for chunk in chunks]
        chunks[0].config.finalize_model_grads_func = finalize_model_grads
        chunks[0].config.no_sync_func = [each.no_sync for each in wrapped] if len(wrapped) > 1 else wrapped[0].no_sync
        replicas, replica = dims.dp(dist.get_world_size()), parallel_state.get_data_parallel_rank()
        ids, mask, images = batch
        own = range(len(ids))[replica * len(ids) // replicas : (replica + 1) * len(ids) // replicas]
        for order in (own[::-1], own) if overlap else (own,):  # reducers learn from the first batch what to wait for
            for each in wrapped:
                each.train()
                each.zero_grad_buffer()
            outputs = mb.forward(
                wrapped,
                ids[order],
                mask[order],
                images=[images[row] for row in order],
                loss=lambda out, rows, order=order: loss(out.log_probs, order[rows]),
                micro_batch_size=1,
                packed=packed,
            )
        return {
            "rows": own,
            "log_probs": outputs.log_probs.detach(),
            "tower": {name: parameter.main_grad.clone() for name, parameter in tower.items()},
        }


def steps(folder: Path, cases: list[tuple[dict[str, Any], dict[str, Any]]], batch: Any) -> list[Any]:
    """Runs in each worker: ``step`` of each case, a mesh and options."""
    return [step(folder, sizes, batch, **options) for sizes, options in cases]


def problems(ranks: list[Any], wanted: tuple[Tensor, dict[str, Tensor]], bound: float) -> list[str]:
    """What is wrong with a step, from what each rank returned."""
    log_probs, tower = wanted
    found = []
    towers = [each["tower"] for each in ranks if each["tower"]]
    for rank, each in enumerate(ranks):
        error = float((each["log_probs"] - log_probs[each["rows"]]).abs().max() / log_probs.std())
        found += [f"rank {rank}: log-probs are {error:.1e} off"] if not error < bound else []
    for name, gradient in tower.items():
        error = max(float((each[name] - gradient).abs().max() / gradient.abs().max()) for each in towers)
        found += [f"{name}: {error:.1e} off"] if not error < bound else []
        found += [f"{name} differs"] if any(not torch.equal(each[name], towers[0][name]) for each in towers) else []
    return found if tower and towers else [*found, "there is no tower"]
