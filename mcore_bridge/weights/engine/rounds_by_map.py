"""Rounds by a map, for an engine with another transport than ours: HF tensors come in buckets without a plan."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from mcore_bridge.errors import TransferError, plural
from mcore_bridge.rules.spec import TensorSpec
from mcore_bridge.weights.engine.engine_tensors import EngineModel
from mcore_bridge.weights.engine.group_copies import take_expected
from mcore_bridge.weights.engine.loader_thread import Loader
from mcore_bridge.weights.engine.map_engine import map_engine
from mcore_bridge.weights.engine.mapped_engine import MappedEngine


class RoundsByMap:
    """Replaces an engine's ``load_weights`` from its second round on.

    The engine's loader loads the first round, and the HF tensors that come are noted. A map is made before the second
    round. From then on the map copies the buckets.

    >>> rounds = RoundsByMap(model, load)
    >>> for pairs in buckets:                       # in every round
    ...     if not rounds.take(pairs):
    ...         model.load_weights(pairs)
    >>> if not rounds.finish():
    ...     process_weights_after_loading(model)

    Args:
        source: the engine's model, or a function that returns its tensors by name.
        load: the engine's loader of a whole round, with all work after loading.
        engine: a line that identifies engine, release, model and rank.
        verify_every: prove the map again before every so many rounds; 0 means never.
    """

    def __init__(self, source: EngineModel, load: Loader, *, engine: str = "", verify_every: int = 0) -> None:
        self.engine: MappedEngine | None = None
        self._source, self._load, self._name, self._verify_every = source, load, engine, verify_every
        self._specs: dict[str, TensorSpec] = {}
        self._due: dict[str, TensorSpec] = {}
        self._has_begun = False
        self._is_first = True

    def take(self, pairs: Iterable[tuple[str, Tensor]]) -> bool:
        """Copy the HF tensors of a bucket into the engine's tensors; they may be overwritten afterwards.

        Returns:
            Whether they were copied. If not, as in the first round, the engine's loader has to take them.

        Raises:
            TransferError: when a tensor did not come in the first round, came with another shape or dtype, or comes
                twice. Also when the engine cannot be mapped; then nothing was copied.
        """
        bucket = [(name, tensor.contiguous()) for name, tensor in pairs]
        if self._is_first:
            self._specs.update((name, TensorSpec.of(name, tensor)) for name, tensor in bucket)
            return False
        engine = self.engine if self._has_begun else self._begun()
        assert engine is not None
        take_expected(bucket, self._due)
        engine.write(bucket)
        self._has_begun = True
        return True

    def _begun(self) -> MappedEngine:
        specs = tuple(self._specs.values())
        if self.engine is None:
            self.engine = map_engine(
                specs, self._source, self._load, engine=self._name, verify_every=self._verify_every
            )
        self.engine.begin(specs)
        self._due = dict(self._specs)
        return self.engine

    def finish(self, version: int | None = None) -> bool:
        """End a round.

        Returns:
            Whether the map loaded the round. Then the engine's work after loading is done as well.

        Raises:
            TransferError: when tensors of the first round have not come; the weights are then half old and half new.
        """
        if self._is_first:
            self._is_first = not self._specs
            return False
        if self.engine is None or not self._has_begun or self._due:
            missing = self._due or self._specs
            raise TransferError(
                f"{plural(len(missing), 'tensor')} never came, such as {next(iter(missing))}; send a whole round again"
            )
        self._has_begun = False
        self.engine.complete(version)
        return True

    def restart(self) -> None:
        """Expect a whole round, after a round that broke off."""
        self._has_begun, self._due = False, {}
        if self.engine is not None:
            self.engine.break_off()
