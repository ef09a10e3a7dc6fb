"""A random image for ``verify``, with its image tokens, in the form that an image processor of transformers returns."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from mcore_bridge.batches.images import no_placeholder, placeholders
from mcore_bridge.factory.vision.check_features import features_in

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel

_PATCHES = (1, 8, 4)
"""Frames, and patches down and across, of an image of a family that takes images of any size."""


@dataclass(frozen=True, slots=True)
class Shown:
    """The batch with images, by row.

    Attributes:
        input_ids: int64 ``[rows, seq]``, on CPU.
        images: for each row, the inputs of its images; empty for a row of text.
        missing: why there are no images although the model has a tower; "" if there are.
    """

    input_ids: Tensor
    images: Sequence[dict[str, Tensor]] = field(default_factory=tuple)
    missing: str = ""

    @property
    def count(self) -> int:
        """The number of images."""
        return sum(map(bool, self.images))

    def of_row(self, row: int) -> dict[str, Tensor]:
        """The inputs of images of a row."""
        return self.images[row] if self.images else {}


def shown(chunks: Sequence[GPTModel], batch: Tensor, multiple_of: int, agreed: Callable[[int | None], int]) -> Shown:
    """Put an image into the first row of a batch, behind its first token. All ranks call it together.

    Args:
        chunks: this rank's chunks. The rank with the tower counts the features of the image.
        batch: random tokens, int64 ``[rows, seq]``.
        multiple_of: rows are made longer by a multiple of it.
        agreed: a function that all ranks call together; it returns the number of the one rank that passes a number.
    """
    if not chunks[0].bridge.tower:
        return Shown(batch)
    config = chunks[0].bridge.config
    inputs = _image(config)
    if not inputs:
        return Shown(batch, missing="without images, since verify makes none for families that cut them into tiles")
    tower = next((chunk.vision for chunk in chunks if hasattr(chunk, "vision")), None)
    count = agreed(None if tower is None else _count(tower, inputs))
    wide = -(-count // multiple_of) * multiple_of
    tokens = [token for token in placeholders(config) if token is not None]
    ids = torch.cat((batch[:, :1], batch[:, :1].expand(-1, wide), batch[:, 1:]), dim=1)
    ids = ids.masked_fill(torch.isin(ids, torch.tensor(tokens)), no_placeholder(config))
    ids[0, 1 : 1 + count] = tokens[0]
    return Shown(ids, [inputs, *({} for _ in batch[1:])])


def _image(config: Any) -> dict[str, Tensor]:
    """The inputs of one image; empty if the family needs something else."""
    vision, generator = config.vision_config, torch.Generator().manual_seed(1)
    patch, size = (_first(getattr(vision, name, None)) for name in ("patch_size", "image_size"))
    if vision.model_type == "pixtral":  # of Mistral 3, LightOnOCR and some llava
        height, width = _PATCHES[1] * patch, _PATCHES[2] * patch
        pixels = torch.randn(1, 3, height, width, generator=generator)
        return {"pixel_values": pixels, "image_sizes": torch.tensor([[height, width]])}
    if hasattr(config, "image_grid_pinpoints"):
        return {}
    arguments = _arguments(config)
    if "image_position_ids" in arguments:  # of Gemma 4: a column and a row for each patch
        rows, columns = (number * getattr(vision, "pooling_kernel_size", 1) for number in _PATCHES[1:])
        places = torch.cartesian_prod(torch.arange(columns), torch.arange(rows))[None]
        flat = 3 * getattr(vision, "model_patch_size", patch) ** 2
        return {
            "pixel_values": torch.rand(1, places.size(1), flat, generator=generator),
            "image_position_ids": places,
        }
    if "image_grid_thw" in arguments:
        whole = hasattr(vision, "merge_kernel_size")  # patches that are not flattened
        one = (3, patch, patch) if whole else (3 * vision.temporal_patch_size * patch**2,)
        pixels = torch.randn(_PATCHES[0] * _PATCHES[1] * _PATCHES[2], *one, generator=generator)
        return {"pixel_values": pixels, "image_grid_thw": torch.tensor([_PATCHES])}
    return {"pixel_values": torch.randn(1, 3, size, size, generator=generator)}


def _arguments(config: Any) -> Container[str]:
    """The names of the arguments of a composite's ``forward``."""
    from transformers import AutoModel

    return inspect.signature(AutoModel._model_mapping[type(config)].forward).parameters


def _first(size: Any) -> Any:
    return size[0] if isinstance(size, list | tuple) else size


@torch.no_grad()
def _count(tower: nn.Module, inputs: dict[str, Tensor]) -> int:
    """The number of features of an image."""
    (some,) = {(parameter.device, parameter.dtype) for parameter in tower.parameters()}
    moved = {name: value.to(some[0], some[1] if value.is_floating_point() else None) for name, value in inputs.items()}
    names = ("vision_feature_layer", "vision_feature_select_strategy")
    config: Any = tower.config
    selected = {name: getattr(config, name) for name in names if hasattr(config, name)}
    features = features_in(tower.get_image_features(**moved, **selected))  # type: ignore[operator]
    return sum(feature.shape[:-1].numel() for feature in features)
