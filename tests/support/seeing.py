"""Batches with images for small composites, transformers' results for them, and training steps on a mesh."""

import inspect
import re
from functools import cache
from operator import attrgetter
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import Tensor

import mcore_bridge as mb
from mcore_bridge.architecture import composites
from mcore_bridge.batches.images import joined, placeholders, token_types
from mcore_bridge.errors import BatchError
from tests import zoo
from tests.support import composites as tiny
from tests.support import stepping
from tests.support.bounds import ROUNDING

BOUND = 3e-5 * ROUNDING
"""The bound for relative differences to transformers, in log-probs and in gradients of towers."""
SPECIAL = {
    "image_token_id": 5,
    "image_token_index": 5,
    "video_token_id": 6,
    "video_token_index": 6,
    "vision_start_token_id": 7,
    "vision_end_token_id": 8,
    "video_start_token_id": 3,
    "video_end_token_id": 4,
}
"""Ids of special tokens inside the vocabulary of the zoo's texts. Published ids are larger."""
FIRST, LAST = 10, 60
"""Ids of text."""
_NORMS = {r"language_model\..*[qk]_norm\.weight$": 0.7, r"language_model\..*norm\d?\.weight$": 0.5}
"""Means of the weights of norms. With means near zero, attention would be uniform, and positions would hardly
matter.
"""
_BY_PINPOINTS = ("llava_next", "llava_next_video", "llava_onevision")
"""Families that cut an image into tiles of one size, by the nearest of some shapes."""


def config(model_type: str, /, **text: Any) -> Any:
    """A small config of a composite with ``SPECIAL`` tokens."""
    hf = tiny.config(model_type, **text)
    for name in SPECIAL.keys() & hf.to_dict().keys():
        setattr(hf, name, SPECIAL[name])
    vision, fields = hf.vision_config, hf.vision_config.to_dict()
    if "window_size" in fields:
        vision.window_size = 2 if model_type == "got_ocr2" else 56  # in patches, or in pixels: two by two features
    if "deepstack_visual_indexes" in fields:
        vision.depth, vision.deepstack_visual_indexes = 3, [1, 2]
    if "num_hidden_layers" in fields and model_type != "kimi_k25":
        vision.num_hidden_layers = 3  # features may come from the last layer but one
    if model_type == "hunyuan_vl":
        vision.max_image_size = 56
    if model_type == "qwen2_vl":
        vision.hidden_size = hf.text_config.hidden_size
    if model_type == "gemma3":
        hf.image_token_id = hf.text_config.vocab_size + 3  # beyond the vocabulary
        vision.image_size, hf.mm_tokens_per_image = 56, 4
        for kind in hf.text_config.rope_parameters.values():  # transformers' dynamic rope remembers earlier rows
            kind.update(rope_type="linear", factor=2.0)
    if model_type in _BY_PINPOINTS:
        hf.image_grid_pinpoints = [[28, 56], [56, 28]]
    if model_type == "llama4":  # four tokens, each of four patches
        vision.image_size, vision.intermediate_size = 56, 4 * vision.hidden_size
        hf.text_config.attn_temperature_tuning = True  # temperature of queries in layers without a rope
        hf.text_config.floor_scale, hf.text_config.attn_scale = 4, 0.5
    if model_type == "vipllava":
        hf.vision_feature_layers = [-1, -2]
    if model_type == "kimi_k25":
        hf.projection_hidden_size = vision.hidden_size
    if model_type.endswith("_thinker"):  # published, and not declared
        hf.vision_start_token_id = SPECIAL["vision_start_token_id"]
    return hf


def written(model_type: str, folder: Path, /, **text: Any) -> Path:
    """Write a random composite as transformers writes it."""
    if transformers.__version__ in composites()[model_type].broken_in:
        pytest.skip("the installed transformers cannot run it")
    torch.manual_seed(0)
    model = tiny.model_class(model_type)(config(model_type, **text)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            mean = next((mean for norm, mean in _NORMS.items() if re.search(norm, name)), 0.0)
            parameter.normal_(mean=mean, std=0.2)
    model.save_pretrained(folder)
    return folder


def reference(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """transformers' model."""
    from transformers import AutoConfig

    model_class = tiny.model_class(AutoConfig.from_pretrained(folder).model_type)
    return model_class.from_pretrained(folder, dtype=dtype, attn_implementation="eager").eval()


Grid = tuple[int, int, int]
ROWS: list[list[int | Grid | tuple[str, Grid]]] = [
    [3, (1, 4, 4), 4, (1, 2, 6), 5],
    [14],
    [2, ("video", (2, 4, 2)), 6, (1, 2, 2), 3],
    [1, (1, 4, 2), 9],
]
"""For each row, numbers of text tokens, and grids of patches. The second row has only text."""


def batch_of(model: Any, layout: Any = None) -> tuple[Tensor, Tensor, list[dict[str, Tensor] | None]]:
    """Ids and mask ``[rows, seq]``, and images by row, for transformers' model. Rows are padded on both sides."""
    generator = torch.Generator().manual_seed(5)
    rows, images = [], []
    for parts in layout or layout_of(model.config.model_type):
        ids: list[int] = []
        inputs: dict[str, list[Tensor]] = {}
        for part in parts:
            if isinstance(part, int):
                ids += torch.randint(FIRST, LAST, (part,), generator=generator).tolist()
                continue
            is_video = isinstance(part[0], str)
            made = _image(model, part[1] if is_video else part, generator, is_video=is_video)
            ids += _tokens(model, made, part, is_video=is_video)
            for name, values in made.items():
                inputs.setdefault(name, []).append(values)
        rows.append(ids)
        images.append(joined([dict(zip(inputs, each, strict=True)) for each in zip(*inputs.values(), strict=True)]))
    seq = max(map(len, rows)) + 2
    ids, mask = torch.zeros(len(rows), seq, dtype=torch.int64), torch.zeros(len(rows), seq, dtype=torch.int64)
    for number, row in enumerate(rows):
        at = slice(number % 3, number % 3 + len(row))
        ids[number, at], mask[number, at] = torch.tensor(row), 1
    return ids, mask, [each or None for each in images]


def layout_of(model_type: str) -> Any:
    """The rows of a family. GLM accepts no image beside a video, and other families accept no video."""
    if model_type.startswith(("qwen", "gemma4")) or model_type in (
        "llava_onevision",
        "llava_next_video",
        "video_llava",
    ):
        return ROWS
    video: Any = [2, ("video", (2, 4, 2)), 6] if model_type.startswith("glm") else [2, (1, 4, 2), 6, (1, 4, 4), 1]
    return [*ROWS[:2], video, ROWS[3]]


def _image(model: Any, grid: Grid, generator: torch.Generator, *, is_video: bool) -> dict[str, Tensor]:
    """The result of a processor for an image with this number of patches."""
    vision, model_type = model.config.vision_config, model.config.model_type
    patch = vision.patch_size[0] if isinstance(vision.patch_size, list | tuple) else vision.patch_size
    pixels, grids, _ = _NAMES[is_video]
    if grids in inspect.signature(tiny.base_of(model).forward).parameters:
        size = (3, patch, patch) if "kimi" in model_type else (3 * vision.temporal_patch_size * patch**2,)
        values = torch.randn(grid[0] * grid[1] * grid[2], *size, generator=generator)
        return {pixels: values, grids: torch.tensor([grid])}
    if model_type in ("mistral3", "lighton_ocr"):
        height, width = grid[1] * patch, grid[2] * patch
        values = torch.randn(1, 3, height, width, generator=generator)
        return {pixels: values, "image_sizes": torch.tensor([[height, width]])}
    if model_type.startswith("gemma4"):
        return _patches(vision, grid, generator, is_video=is_video)
    size = vision.image_size[0] if isinstance(vision.image_size, list | tuple) else vision.image_size
    if is_video:
        return {pixels: torch.randn(1, grid[0], 3, size, size, generator=generator)}
    if model_type in _BY_PINPOINTS:
        values = torch.randn(1, 3, 3, size, size, generator=generator)
        return {pixels: values, "image_sizes": torch.tensor([[size * 2, size]])}
    return {pixels: torch.randn(1, 3, size, size, generator=generator)}


def _patches(vision: Any, grid: Grid, generator: torch.Generator, *, is_video: bool) -> dict[str, Tensor]:
    """The result of a processor that pads the patches of each frame: pixels, and a column and a row for each patch."""
    most, (frames, rows, columns) = 16, grid
    size = 3 * getattr(vision, "model_patch_size", vision.patch_size) ** 2
    places = torch.cartesian_prod(torch.arange(columns), torch.arange(rows)).repeat(frames, 1, 1)
    values = torch.randn(frames, places.size(1), size, generator=generator)
    room = (0, 0, 0, most - places.size(1))
    values, places = torch.nn.functional.pad(values, room), torch.nn.functional.pad(places, room, value=-1)
    if not is_video:
        return {"pixel_values": values, "image_position_ids": places}
    numbers = torch.tensor([frames])
    return {"pixel_values_videos": values, "video_position_ids": places, "num_frames_per_video": numbers}


@torch.no_grad()
def _tokens(model: Any, inputs: dict[str, Tensor], part: Any, *, is_video: bool) -> list[int]:
    """The tokens of an image or a video: one for each feature. Some families put text between frames."""
    model_type = model.config.model_type
    base = tiny.base_of(model)
    features = (base.get_video_features if is_video else base.get_image_features)(
        *inputs.values(), **_selected(model.config)
    )
    output = features.last_hidden_state if features.pooler_output is None else features.pooler_output
    count = sum(len(each) for each in output) if not isinstance(output, Tensor) else output.shape[:-1].numel()
    video_has_own = is_video and not model_type.startswith("glm")
    token = placeholders(model.config)[1 if video_has_own else 0]
    frames = part[1][0] if is_video and model_type.startswith(("qwen3", "glm")) else 1
    start, end = ("video_start_token_id", "video_end_token_id") if is_video else ("vision_start_token_id", FIRST)
    inner = [each for _ in range(frames) for each in (*[token] * (count // frames), 9)]
    return [SPECIAL[start], *inner, SPECIAL.get(end, FIRST)]


def _selected(hf: Any) -> dict[str, Any]:
    names = ("vision_feature_layer", "vision_feature_layers", "vision_feature_select_strategy", "vision_aspect_ratio")
    owner = hf.vision_config if hf.model_type == "llama4" else hf
    return {name: getattr(owner, name) for name in names if hasattr(owner, name)}


_NAMES = {
    False: ("pixel_values", "image_grid_thw", "image_token_id"),
    True: ("pixel_values_videos", "video_grid_thw", "video_token_id"),
}


def expected(
    model: Any, ids: Tensor, mask: Tensor, images: Any, *, values: bool = False
) -> tuple[Tensor, dict[str, Tensor]]:
    """transformers' log-probs ``[rows, seq]``, and the gradients of the tower for the loss of ``step``.

    With ``values``, it returns outputs of a random value head in the place of log-probs.
    """
    found = torch.zeros(ids.shape)
    size, std = model.config.text_config.hidden_size, model.config.text_config.initializer_range
    head = torch.randn(1, size, generator=torch.Generator().manual_seed(0)) * std
    ropes: list[Any] = [module for module in model.modules() if hasattr(module, "max_seq_len_cached")]
    for row, shown in enumerate(mask.bool()):
        for rope in ropes:  # a dynamic rope would remember earlier rows
            rope.max_seq_len_cached = rope.original_max_seq_len
        inputs = _inputs(model, ids[row : row + 1, shown], images[row])
        if values:
            own = model.model(**inputs).last_hidden_state.float()[0] @ head[0].to(ids.device)
        else:
            own = model(**inputs).logits.float()[0, :-1].log_softmax(-1)
            own = own.gather(-1, ids[row, shown][1:, None].clamp(max=own.size(-1) - 1))[:, 0]
        found = found.index_put((torch.tensor(row), shown.nonzero()[-len(own) :, 0].cpu()), own.cpu())
    model.zero_grad()
    of_text = (token_types(model.config, ids) == 0).cpu()
    loss(found * of_text, range(len(ids))).backward()
    tower = {
        name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
        for name, parameter in tiny.base_of(model).named_parameters()
        if not name.startswith("language_model.")
    }
    return (found * of_text).detach(), tower


def _inputs(model: Any, ids: Tensor, images: Any) -> dict[str, Any]:
    """The inputs of transformers for a row."""
    types = token_types(model.config, ids)
    known = inspect.signature(model.forward).parameters
    named = {name: types for name in ("mm_token_type_ids", "token_type_ids") if name in known}
    mask = {"attention_mask": torch.ones_like(ids)}  # from which a thinker computes positions
    return {"input_ids": ids, **mask, **named, **(images or {})}


DYNAMIC = {"rope_type": "dynamic", "factor": 4.0}


@cache
def case(name: str) -> Any:
    """A folder, a batch with transformers' log-probs, and ``expected``.

    A name may end in " dynamic", " critic", the ``model_type`` of another text, or a case of the zoo.
    """
    model_type, _, kind = name.partition(" ")
    of_zoo = zoo.cases()[kind].fields if kind in zoo.cases() else {}
    text: dict[str, Any] = {"model_type": kind} if kind in tiny.TEXTS else dict(of_zoo)
    if kind == "dynamic":
        rope = tiny.config(model_type).text_config.rope_parameters
        text = {"rope_parameters": {**rope, **DYNAMIC}, "max_position_embeddings": 8}
    folder = written(model_type, Path(mkdtemp()), **text)
    model = reference(folder)
    batch = batch_of(model)
    wanted = expected(model, *batch, values=kind == "critic")
    return folder, (*batch, wanted[0]), wanted


def loss(log_probs: Tensor, rows: Any) -> Tensor:
    """The mean over rows of weighted sums: an equal part for each row."""
    weights = torch.randn(8, log_probs.size(1), generator=torch.Generator().manual_seed(9))[list(rows)]
    return (log_probs * weights.to(log_probs.device)).sum(1).mean()


def built(folder: Path, dims: mb.ParallelDims, **options: Any) -> list[Any]:
    """This rank's chunks with a trained tower, by default in fp32 on CPU."""
    options = {"dtype": torch.float32, "device": "cpu", "vision": "train", **options}
    return mb.build_model(folder, dims=dims, **options)


def step(
    folder: Path,
    sizes: dict[str, Any],
    batch: Any,
    *,
    overlap: bool = False,
    packed: bool = True,
    recompute: bool = False,
    bare: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """Runs in each worker: log-probs of its share of the rows, and the tower's gradients before a mean over TP.

    Args:
        batch: the result of ``batch_of``, and log-probs of ``expected``, which are zero at tokens without a loss.
        recompute: recompute the layers of the tower.
        bare: without DDP.
    """
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads

    dims, device = mb.ParallelDims(**sizes), options.get("device", "cpu")
    with stepping.mesh(dims, device):
        chunks = built(folder, dims, **options)
        tower = dict(chunks[0].vision.named_parameters()) if hasattr(chunks[0], "vision") else {}
        tower = {name: parameter for name, parameter in tower.items() if parameter.requires_grad}
        for parameter in tower.values():
            parameter.average_gradients_across_tp_domain = False
        if recompute and tower:
            chunks[0].vision.gradient_checkpointing_enable()
        grad_of = attrgetter("grad" if bare else "main_grad")
        read = attrgetter("values" if options.get("head") == "value" else "log_probs")
        size = 1 if overlap else None  # a bucket for each parameter
        settings = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, overlap_grad_reduce=overlap, bucket_size=size
        )
        wrapped: list[Any] = chunks
        if not bare:
            wrapped = [DistributedDataParallel(chunk.config, settings, chunk) for chunk in chunks]
            syncs = [each.no_sync for each in wrapped]
            chunks[0].config.finalize_model_grads_func = finalize_model_grads
            chunks[0].config.no_sync_func = syncs if len(syncs) > 1 else syncs[0]
        replicas, replica = dims.dp(dist.get_world_size()), parallel_state.get_data_parallel_rank()
        images, (ids, mask, wanted) = batch[2], (batch[place].to(device) for place in (0, 1, 3))
        own = range(len(ids))[replica * len(ids) // replicas : (replica + 1) * len(ids) // replicas]
        for order in (own[::-1], own) if overlap else (own,):  # reducers record parameters in the first batch
            for each in wrapped:
                each.train()
                each.zero_grad() if bare else each.zero_grad_buffer()
            outputs = mb.forward(
                wrapped,
                ids[order],
                mask[order],
                images=[images[row] for row in order],
                loss=lambda out, rows, order=order: loss(read(out) * (wanted != 0)[order[rows]], order[rows]),
                micro_batch_size=1,
                packed=packed,
            )
        return {
            "rows": [*own],  # which torch.load takes
            "log_probs": (read(outputs).detach() * (wanted != 0)[own]).cpu(),
            "tower": {name: grad_of(parameter).cpu().clone() for name, parameter in tower.items()},
        }


def steps(folder: Path, cases: list[tuple[dict[str, Any], dict[str, Any]]], batch: Any) -> list[Any]:
    """Runs in each worker: ``step`` of each case, a mesh and options."""
    return [step(folder, sizes, batch, **options) for sizes, options in cases]


def problems(ranks: list[Any], wanted: tuple[Tensor, dict[str, Tensor]], bound: float) -> list[str]:
    """The faults of a step, from the results of each rank."""
    log_probs, tower = wanted
    found = []
    towers = [each["tower"] for each in ranks if each["tower"]]
    found += [] if all(each.keys() == tower.keys() for each in towers) else ["other parameters are trained"]
    for rank, each in enumerate(ranks):
        error = float((each["log_probs"] - log_probs[each["rows"]]).abs().max() / log_probs.std())
        found += [f"rank {rank}: log-probs are {error:.1e} off"] if not error < bound else []
    for name, gradient in tower.items():
        size = tower[name.replace("k_proj.bias", "k_proj.weight")].abs().max()  # its gradient is only noise
        error = max(float((each[name] - gradient).abs().max() / size.clamp_min(1e-30)) for each in towers)
        found += [f"{name}: {error:.1e} off"] if not error < bound else []
        found += [f"{name} differs"] if any(not torch.equal(each[name], towers[0][name]) for each in towers) else []
    return found if tower and towers else [*found, "there is no tower"]


def misfitting(folder: Path, sizes: dict[str, Any], batch: Any) -> str:
    """Runs in each worker: the error for a row that is cut inside its last image. The next row has one token more."""
    ids, mask, images, _ = batch
    dims = mb.ParallelDims(**sizes)
    with stepping.mesh(dims):
        chunks = built(folder, dims)
        token = placeholders(chunks[0].bridge.config)[0]
        ids = ids.clone()
        last, more = (ids[2] == token).nonzero()[-1], (ids[3] == token).nonzero()[-1] + 1
        ids[2, last], ids[3, more] = FIRST, token
        try:
            mb.forward(chunks, ids, mask, images=images)
        except BatchError as error:
            return str(error)
    return ""


def calls(folder: Path, sizes: dict[str, Any], batch: Any) -> dict[str, Tensor]:
    """Runs in each worker: log-probs of ``batch`` by each form of a trainer's call, on a mesh without a pipeline.

    If a family numbers tokens of images differently, the caller also passes positions, right and "swapped".
    """
    from mcore_bridge.batches.rows import lay_out_rows, placed
    from mcore_bridge.batches.text_collectives import gather

    ids, mask, images, _ = batch
    dims = mb.ParallelDims(**sizes)
    with stepping.mesh(dims), torch.no_grad():
        (model,) = built(folder, dims)
        groups = model.pg_collection
        packed = mb.pack_sequences(ids, mask, dims=dims, cp_rank=groups.cp.rank())
        seq = -(-ids.size(1) // 4) * 4  # a multiple for context parallelism
        wide, shown = (torch.nn.functional.pad(each, (0, seq - ids.size(1))) for each in (ids, mask.bool()))
        rows = lay_out_rows(wide, dims.cp, groups.cp.rank())
        own = {"attention_mask": placed(shown, rows.places[groups.cp.rank()]), "position_ids": rows.position_ids}
        params = {"packed_seq_params": packed.packed_seq_params}
        seen = joined(images)
        whole = {"input_ids": ids, "attention_mask": mask.bool(), **params}
        forms = {
            "verl, packed": (packed, whole),
            "verl, rows": (rows, {"input_ids": wide, "attention_mask": shown}),
            "own rows": (rows, {"input_ids": rows.input_ids, **own}),
            "slime": (packed, {"input_ids": packed.input_ids, "attention_mask": None, **params}),
        }
        given = {}
        if hasattr(model.vision, "get_rope_index"):
            places = _positions(model, ids, mask, seen)
            given = {"3D": places, "swapped": places[[1, 0, *range(2, len(places))]]}
        forms |= {name: (packed, {**whole, "position_ids": each}) for name, each in given.items()}
        found = {}
        for name, (layout, inputs) in forms.items():
            logits = model(**{"position_ids": None, **inputs}, **seen)
            vocab = {"vocab_size": model.bridge.hf.vocab_size, "group": groups.tp}
            values, _ = mb.log_probs(logits, layout.labels, **vocab)
            found[name] = mb.unpack_sequences(layout, gather(values, groups.cp), following=True)[:, : ids.size(1)]
        for name, places in given.items():
            told = [each and {**each, "position_ids": places[:, row]} for row, each in enumerate(images)]
            found[f"forward, {name}"] = mb.forward([model], ids, mask, images=told, packed=name == "3D").log_probs
        return found


def _positions(model: Any, ids: Tensor, mask: Tensor, inputs: dict[str, Any]) -> Tensor:
    """transformers' positions of a batch, ``[3, batch, seq]``, or of four for each token."""
    grids = {name: inputs[name] for name in ("image_grid_thw", "video_grid_thw") if name in inputs}
    types = token_types(model.bridge.config, ids)
    positions: Tensor = model.vision.get_rope_index(ids, types, **grids, attention_mask=mask)[0]
    return positions


def after_a_step(folder: Path, batch: Any) -> tuple[Tensor, Tensor]:
    """Runs in each worker: log-probs of its rows after a step that gathers parameters, or leaves it to the forward."""
    return _after_a_step(folder, batch, late=False), _after_a_step(folder, batch, late=True)


def _after_a_step(folder: Path, batch: Any, *, late: bool) -> Tensor:
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads

    from tests.workers.verl_engine import CpuForCuda

    ids, mask, images, wanted = batch
    with stepping.mesh(mb.ParallelDims()):
        chunks = built(folder, mb.ParallelDims())
        settings = DistributedDataParallelConfig(
            use_distributed_optimizer=True, overlap_grad_reduce=True, overlap_param_gather=late, bucket_size=1
        )
        (model,) = wrapped = [DistributedDataParallel(chunk.config, settings, chunk) for chunk in chunks]
        config = chunks[0].config
        config.finalize_model_grads_func, config.no_sync_func = finalize_model_grads, model.no_sync
        optimizer = stepping.distributed_optimizer(wrapped, lr=1e-2)
        own = range(4)[parallel_state.get_data_parallel_rank() * 2 :][:2]
        shown = (wanted != 0)[own]
        model.zero_grad_buffer()
        options = {"images": [images[row] for row in own], "micro_batch_size": 1}
        learn = {"loss": lambda out, rows: loss(out.log_probs * shown[rows], own[rows])}
        mb.forward(wrapped, ids[own], mask[own], **learn, **options)
        with CpuForCuda():
            optimizer.step()
        return (mb.forward(wrapped, ids[own], mask[own], **options).log_probs * shown).detach()
