"""HF tensors that arrive one after the other. A part is kept until all parts that belong to it have arrived."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from torch import Tensor

from mcore_bridge.config.quantization import Quantization
from mcore_bridge.errors import CheckpointError, shown
from mcore_bridge.rules.encoded import Weight
from mcore_bridge.rules.mapping import WeightMapping, pattern_of
from mcore_bridge.rules.scheme import Encoding, is_part, is_unused, stem_of
from mcore_bridge.rules.spec import TensorSpec
from mcore_bridge.weights.source.conventions import prefix_in, stacks_of, transposed_in
from mcore_bridge.weights.source.encoded_weights import encoded, scheme_within, specs_of


class Pairs(Iterable[tuple[str, Weight]]):
    """Pairs of HF names and tensors.

    The parts of an encoded weight are kept until all have arrived. This also holds for the two stacks of experts of a
    layer.

    Attributes:
        unused: after the last pair, the names of tensors that no weight needs, such as scales of activations.
    """

    def __init__(self, pairs: Iterable[tuple[str, Tensor]], quantization: Quantization | None) -> None:
        self._pairs = pairs
        self._quantization = quantization
        self.unused: list[str] = []

    def for_model(self, mapping: WeightMapping) -> Iterator[tuple[str, Weight]]:
        """Yield plain names and tensors, by the names, and in the orientation, of a model's rules.

        Raises:
            CheckpointError: an item is no pair, or a tensor comes twice. At the end: parts of encoded weights are
                incomplete; the message names them.
        """
        prefix, stacks = prefix_in(mapping), stacks_of(mapping)
        layers: dict[str, dict[str, Tensor]] = {}
        for stored, tensor in self:
            is_headless = prefix and not mapping.consumers(stored) and mapping.consumers(f"{prefix}{stored}")
            name = f"{prefix}{stored}" if is_headless else stored
            if not stacks or pattern_of(name) not in stacks or not isinstance(tensor, Tensor):
                yield name, tensor
                continue
            layer = layers.setdefault(name.rpartition(".")[0], {})
            if name in layer:
                raise _twice(name)
            layer[name] = tensor
            if len(layer) == 2:
                del layers[name.rpartition(".")[0]]
                transposed = transposed_in(layer, stacks)
                yield from ((own, stack.mT if own in transposed else stack) for own, stack in layer.items())
        for layer in layers.values():
            yield from layer.items()

    def __iter__(self) -> Iterator[tuple[str, Weight]]:
        """The plain names and tensors."""
        waiting: dict[str, dict[str, Tensor]] = {}  # parts by the common prefix of their names
        done: set[str] = set()
        for name, tensor in self._checked():
            if not isinstance(tensor, Tensor) or not is_part(TensorSpec.of(name, tensor)):
                yield name, tensor
                continue
            group = waiting.setdefault(stem_of(name), {})
            if name in group or name in done:
                raise _twice(name)
            group[name] = tensor
            for plain, held in self._complete(group):
                yield plain, encoded(plain, held, group)
                done.update(held.names)
                for part in held.names:
                    del group[part]
        left = {name: tensor for group in waiting.values() for name, tensor in group.items()}
        scheme = scheme_within(specs_of(left), self._quantization)
        self.unused += scheme.unused
        for name in scheme.plain(left):
            if name in scheme.held:
                yield name, encoded(name, scheme.held[name], left)
            elif done and is_unused(name):
                self.unused.append(name)
            else:
                yield name, left[name]

    def _checked(self) -> Iterator[tuple[str, Tensor]]:
        for pair in self._pairs:
            if not (isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str)):
                raise CheckpointError(f"the source must yield pairs of an HF name and a tensor, found {shown(pair)}")
            yield pair

    def _complete(self, group: Mapping[str, Tensor]) -> list[tuple[str, Encoding]]:
        """The encoded weight of ``group``; None until all parts have come. The stored shape of int4 is a part, too."""
        try:
            held = scheme_within(specs_of(group), self._quantization).held
        except CheckpointError:  # incomplete, or wrong, which raises at the end
            return []
        return [(name, weight) for name, weight in held.items() if weight.codec.kind != "int4" or weight.shape_tensor]


def _twice(name: str) -> CheckpointError:
    return CheckpointError(f"{name} came twice; every HF tensor must come exactly once")
