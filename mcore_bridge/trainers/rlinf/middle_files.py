"""RLinf's middle files: one file for each layer, with Megatron's names. RLinf converts them to files of any mesh."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from mcore_bridge.config.mesh.parallel_dims import ParallelDims
from mcore_bridge.convert.assemble import HFTensors
from mcore_bridge.convert.rank_files.file_layout import FileLayout
from mcore_bridge.rules.mapping import Binding, axes_of, unstacked
from mcore_bridge.rules.names import layer_of
from mcore_bridge.rules.spec import TensorSpec
from mcore_bridge.rules.trace import Trace, trace
from mcore_bridge.weights.files.hf_folder import Checkpoint

PRE, POST = "pre", "post"


def write_middle(layout: FileLayout, source: HFTensors, folder: Path) -> None:
    """Write a file for each layer from ``0.safetensors`` on, and ``pre`` and ``post``, with one in memory at a time.

    Args:
        layout: the layout without parallelism.
        source: HF tensors by name.
    """
    names: dict[str, list[str]] = {}
    for mcore, binding in layout.bindings.items():
        if binding.exported:
            names.setdefault(_file_of(mcore), []).append(mcore)
    for file, held in names.items():
        save_file({mcore: layout.shard(mcore, 0, source) for mcore in held}, folder / f"{file}.safetensors")


def _file_of(mcore: str) -> str:
    layer = layer_of(mcore)
    if layer is not None:
        return str(layer)
    return PRE if mcore.startswith("embedding.") else POST


class MiddleFiles(Mapping[str, Tensor]):
    """HF tensors by name. Each tensor is made from middle files on access.

    Args:
        folder: the folder of the files, with the HF config from which they were made.
    """

    def __init__(self, folder: Path) -> None:
        self._files = Checkpoint(folder)
        self._layout = FileLayout(folder, ParallelDims(), {})
        self._parts: dict[str, dict[int | None, tuple[str, int]]] = {}
        self.specs: dict[str, TensorSpec] = {}
        """The specs of all tensors, by name."""
        for mcore, tensor in self._files.items():
            binding, traced = self._traced(mcore, tensor)
            for part, (hf, shape) in enumerate(zip(binding.hf, traced.part_shapes, strict=True)):
                name, entry = unstacked(hf)
                self._parts.setdefault(name, {})[entry] = mcore, part
                whole = shape if entry is None else (self._layout.axes["experts"], *shape)
                self.specs[name] = TensorSpec(name, whole, tensor.dtype)

    def _traced(self, mcore: str, tensor: Tensor) -> tuple[Binding, Trace]:
        binding = self._layout.mapping.bind(mcore)
        return binding, trace(binding.layout, tuple(tensor.shape), axes_of(binding, self._layout.axes))

    def __getitem__(self, name: str) -> Tensor:
        parts = self._parts[name]
        tensors = [self._part(*parts[entry]) for entry in sorted(parts, key=lambda entry: entry or 0)]
        return tensors[0] if None in parts else torch.stack(tensors)

    def _part(self, mcore: str, number: int) -> Tensor:
        shard = self._files[mcore]
        return self._traced(mcore, shard)[1].part(number, {0: shard})

    def release(self, name: str) -> None:
        """Free the memory of pages that were read for ``name``."""
        for mcore, _ in self._parts[name].values():
            self._files.files[mcore].release(mcore)

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)
