"""Converts an HF folder and a PEFT folder to an HF folder with merged adapters, one tensor after the other.

All other tensors keep their bits, also tensors that no parameter uses. The adapters may store experts in another
format than the files. So a tensor and its adapter are matched through the parameter of megatron-core.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from mcore_bridge.convert.conversion import units_of_tensors, widespread
from mcore_bridge.convert.hf_to_plain import PIECE_ELEMENTS, ToPlain
from mcore_bridge.convert.reference_model import WholeModel, whole_model
from mcore_bridge.errors import CheckpointError, plural
from mcore_bridge.factory.gpt_inputs import to_transformer_config
from mcore_bridge.rules.adapters import (
    ENDS,
    adapter_rules,
    factor_name,
    modules_of_adapter,
    rows_of_parts,
)
from mcore_bridge.rules.mapping import Binding, ModelAxes, WeightMapping, axes_of, pattern_of, unstacked
from mcore_bridge.rules.spec import TensorSpec
from mcore_bridge.rules.trace import Shape, trace
from mcore_bridge.weights.bound import axes_of_config
from mcore_bridge.weights.peft.peft_folder import PeftFolder, is_beside_text, open_peft, require_shapes
from mcore_bridge.weights.plan.inventory import ParamEntry
from mcore_bridge.weights.provenance import Provenance, head_of, provenance_of
from mcore_bridge.weights.sent.merging import factor_of_rows, squares_with_product, with_product
from mcore_bridge.weights.source.source import Source, open_folder

Matrix = tuple[str, int | None]
"""A tensor of the files, or one expert of a stack of experts."""


@dataclass(frozen=True, kw_only=True)
class ToMerged(ToPlain):
    """The conversion; ``specs`` are all tensors of the base.

    Attributes:
        adapter: the PEFT folder.
        provenance: the provenance of the base.
        axes: sizes of the model, without parallelism.
        places: for each matrix that an adapter changes: its parameter, and the index of the part that it is.
        turned: the tensors that the files hold in the reverse orientation of the rules.
    """

    adapter: Path
    provenance: Provenance
    axes: ModelAxes
    places: Mapping[Matrix, tuple[ParamEntry, int]]
    turned: frozenset[str]

    @classmethod
    def of(cls, source: Path, adapter: Path, staging: Path, *, file_bytes: int) -> ToMerged:
        """Plan the conversion.

        Raises:
            ConfigError: the family of the base is not supported.
            CheckpointError: the base has encoded weights, or lacks one that has an adapter; or the adapter cannot be
                read, or does not fit. All problems are named.
        """
        base = open_folder(source)
        if base.is_encoded:
            raise CheckpointError(
                f"{source} has quantized weights, expected plain ones: convert it with --to hf first, and merge that"
            )
        own = widespread((tensor.dtype, tensor.nbytes) for tensor in base.values())
        vision = "frozen" if is_beside_text(adapter, provenance_of(source)) else "text_only"
        model = whole_model(source, dtype=own, names=base, head=head_of(source), vision=vision)
        config = to_transformer_config(source)
        vocab = model.provenance.hf.vocab_size
        specs = tuple(TensorSpec.of(name, tensor) for name, tensor in base.items())
        view = base.for_model(model.mapping)
        made = cls(
            source=source,
            staging=staging,
            units=units_of_tensors(specs, file_bytes),
            specs=specs,
            dtype=None,
            adapter=adapter,
            provenance=model.provenance,
            axes=axes_of_config(config, vocab=vocab, padded_vocab=vocab),
            places={},
            turned=frozenset(entry.names[0] for entry in map(view.stored, view) if entry.is_transposed),
        )
        return replace(made, places=_places(made, model, view))

    @property
    def options(self) -> object:
        """See ``Conversion``."""
        return str(self.adapter.absolute())

    @cached_property
    def given(self) -> PeftFolder:
        """The adapters."""
        experts = self.axes["experts"]
        assert isinstance(experts, int)
        num_layers = self.provenance.hf.num_hidden_layers
        return open_peft(self.adapter, self.provenance, num_layers=num_layers, num_experts=experts)

    @cached_property
    def rules(self) -> WeightMapping:
        """The rules of the adapters, in their own format of experts."""
        rules = self.provenance.mapping(tied=False, expert_format=self.given.expert_format).rules
        return WeightMapping(adapter_rules(rules, self.given.targets, dora=self.given.dora))

    def pieces(self, spec: TensorSpec) -> Iterator[Tensor]:
        """Yield the elements of a tensor in order, some at a time, flat and on the CPU."""
        stacked = [index for name, index in self.places if name == spec.name]
        if not stacked:
            yield from super().pieces(spec)
            return
        tensor = self.stored[spec.name]
        assert isinstance(tensor, Tensor)
        for index in [None] if None in stacked else range(len(tensor)):
            place = self.places.get((spec.name, index))
            matrix = tensor if index is None else tensor[index]
            left, right = self._factors(*place) if place else (None, None)
            magnitude = self._magnitude(*place) if place else None
            if spec.name in self.turned and left is not None and right is not None:
                left, right = right.mT, left.mT
            rows = max(PIECE_ELEMENTS // matrix.shape[1], 1)
            for start in range(0, len(matrix), rows):
                held = self.stored.read(spec.name, matrix[start : start + rows])
                if left is not None and right is not None:
                    held = self._merged(held, left[start : start + rows], right, magnitude, start)
                yield held.flatten()

    def _merged(self, held: Tensor, left: Tensor, right: Tensor, magnitude: Tensor | None, start: int) -> Tensor:
        """Some rows of a matrix, from row ``start`` on, with the product of these factors."""
        scale, factor = self.given.alpha / self.given.rank, None
        if magnitude is not None:
            squares = squares_with_product(held, left, right, scale)
            factor = factor_of_rows(magnitude[start : start + len(held)], squares)
        return with_product(held, left, right, scale, factor)

    def _magnitude(self, entry: ParamEntry, part: int) -> Tensor | None:
        """The magnitudes of DoRA for the rows of one part of a parameter; None without DoRA or without an adapter."""
        name = f"{entry.hf[part].removesuffix('.weight')}{ENDS[2]}"
        return self.given.tensors.get(name)

    def _factors(self, entry: ParamEntry, part: int) -> tuple[Tensor, Tensor]:
        """The two fp64 factors whose product is added to one part of a parameter.

        They are the rows of B for the part, ``[rows, parts * rank]``, and all A. If the part is stored as ``[in,
        out]``, they are the transposes of A and of B.
        """
        left, right = self._whole_factors(entry)
        copies = [copy for copy in entry.trace.to_hf if copy.part == part]
        is_turned, rows = copies[0].view is not None, left
        if copies[0].dim == 0:
            rows = left.new_empty((entry.trace.part_shapes[part][copies[0].part_dim], left.shape[1]))
            for copy in copies:
                replace(copy, view=None).of_part(rows).copy_(copy.of_shard(left))
        return (right.mT, rows.mT) if is_turned else (rows, right)

    def _whole_factors(self, entry: ParamEntry) -> tuple[Tensor, Tensor]:
        """B with a column for each row of A, in the order of the parameter's rows, and all A, in fp64."""
        bindings, given = self.bindings(entry), self.given
        assert bindings
        first, second, *_ = bindings
        tensors = {}
        for hf in (*first.hf, *second.hf):
            name, index = unstacked(hf)
            tensor = given.tensors[name]
            tensors[name] = (tensor if index is None else tensor[index]).double()
        own = replace(given, tensors=tensors).at(given.rank, given.alpha / given.rank)
        ins, outs = ([own[unstacked(hf)[0]] for hf in binding.hf] for binding in (first, second))
        traced = trace(second.layout, (entry.held.shape[0], given.rank), axes_of(second, self.axes))
        chosen = torch.nn.functional.one_hot(rows_of_parts(traced, 0) + 1, len(ins) + 1)[:, 1:]
        return (chosen[:, :, None] * traced.shard(0, outs, torch.float64)[:, None, :]).flatten(1), torch.cat(ins)

    def shapes(self, entry: ParamEntry) -> dict[str, Shape]:
        """The shapes of one expert's factors, or of a layer's, by HF name, at the largest rank."""
        bindings, rank, (rows, columns) = self.bindings(entry), self.given.rank, entry.held.shape
        assert bindings
        shapes: dict[str, Shape] = {}
        for binding, held in zip(
            bindings, ((len(bindings[0].hf) * rank, columns), (rows, rank), (rows,)), strict=False
        ):
            parts = trace(binding.layout, held, axes_of(binding, self.axes)).part_shapes
            shapes |= {unstacked(hf)[0]: shape for hf, shape in zip(binding.hf, parts, strict=True)}
        return shapes

    def bindings(self, entry: ParamEntry) -> tuple[Binding, ...] | None:
        """The HF tensors of A and B, and with DoRA of magnitudes, of a parameter; None if it has no adapter."""
        module = entry.held.name.removesuffix(".weight")
        names = [factor_name(module, end) for end in modules_of_adapter(self.given.dora)]
        if {pattern_of(name) for name in names}.isdisjoint(rule.mcore for rule in self.rules.rules):
            return None
        bindings = tuple(map(self.rules.bind, names))
        names = [unstacked(name)[0] for binding in bindings for name in binding.hf]
        present = [name for name in names if name in self.given.tensors]
        if present and len(present) < len(names):
            absent = [name for name in names if name not in present]
            raise CheckpointError(f"the adapter in {self.adapter} has {present[0]}, and lacks {absent}: save it again")
        return bindings if present else None


def _places(made: ToMerged, model: WholeModel, base: Source) -> dict[Matrix, tuple[ParamEntry, int]]:
    places: dict[Matrix, tuple[ParamEntry, int]] = {}
    shapes: dict[str, Shape] = {}
    for entry in model.entries:
        if made.bindings(entry):
            shapes |= made.shapes(entry)
            for part, hf in enumerate(entry.hf):
                name, index = unstacked(hf)
                in_file = base.stored(name).names[0] if name in base else name
                places[in_file, index] = entry, part
    files = {own for name in base for own in base.stored(name).names}
    if absent := sorted({name for name, _ in places} - files):
        raise CheckpointError(
            f"{made.source} lacks {plural(len(absent), 'tensor')} with adapters, such as {absent[:4]}: expected the "
            "base on which the adapter was trained"
        )
    require_shapes(made.adapter, made.given, shapes)
    return places
