"""One worker of an engine while a trainer sends weights: it makes a map of its loader, and takes rounds by it.

The trainer's ``WeightSync`` decides. A worker enters ``receive`` at each round, says who it is, and does what it is
asked until the round ends.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cached_property
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from mcore_bridge.arguments import COUNT, FUNCTION, LEAST_0, MAPPING, Kind, instance_of, require
from mcore_bridge.engines.channel import Address, tell
from mcore_bridge.errors import TransferError, describe
from mcore_bridge.machine import this_machine
from mcore_bridge.rules.spec import TensorSpec
from mcore_bridge.weights.engine.comparison import Compared, MapComparison
from mcore_bridge.weights.engine.engine_tensors import EngineModel, device_of
from mcore_bridge.weights.engine.loader_thread import Loader
from mcore_bridge.weights.engine.map_engine import map_engine
from mcore_bridge.weights.engine.mapped_engine import MappedEngine, engine_without_map
from mcore_bridge.weights.engine.puller import Puller
from mcore_bridge.weights.ipc.buckets import BucketPlan
from mcore_bridge.weights.ipc.receiver import Receiver
from mcore_bridge.weights.ipc.shared_memory import Handle, gpu_of
from mcore_bridge.weights.plan.boxes import Table
from mcore_bridge.weights.plan.engine_map import EngineMap
from mcore_bridge.weights.transfer.copier import AllocationLayout, PlacedMaker

if TYPE_CHECKING:  # they need einops, which vLLM and SGLang have; engines on the trainer's machine do without
    from mcore_bridge.engines.guest import Guest
    from mcore_bridge.weights.transfer.program import Program

logger = logging.getLogger(__name__)
CACHE = "MCORE_BRIDGE_CACHE"
"""The environment variable that names the folder of kept maps."""

_SOURCE = Kind("the engine's model, or a function that returns its tensors by name", callable, "pass one of them")


@dataclass(frozen=True, slots=True)
class Identity:
    """Which worker this is, and where."""

    engine: int
    """The number of the engine among those of the trainer."""
    name: str
    """Engine, release, model, and the worker's place in the engine's mesh."""
    rank: int
    size: int
    machine: str
    gpu: str
    """The UUID of its GPU; empty on a CPU."""

    def is_on(self, machine: str) -> bool:
        """Whether the worker is on a machine, which must be known."""
        return self.machine == machine != ""

    @property
    def place(self) -> tuple[int, int]:
        """Engine and rank, which no two workers share."""
        return self.engine, self.rank

    def __str__(self) -> str:
        """What messages call it."""
        return f"{self.name} of engine {self.engine}"


@dataclass(frozen=True, slots=True)
class Invitation:
    """What the trainer's call to an engine carries to each of its workers. Its fields are plain JSON."""

    address: Address
    engine: int
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """A dict of plain values, which any channel carries."""
        return asdict(self)

    @classmethod
    def from_json(cls, given: Mapping[str, Any]) -> Invitation:
        """The inverse of ``to_json``.

        Raises:
            TransferError: when it is something else.
        """
        try:
            address = Address(**given["address"])
            return cls(address, int(given["engine"]), float(given["seconds"]))
        except (TypeError, KeyError, ValueError) as error:
            raise TransferError(f"expected what a WeightSync has sent, found other values ({error!r})") from None


class EngineWorker:
    """One worker of an engine, with its model and its loader.

    Args:
        source: the engine's model, or a function that returns its tensors by name.
        load: the engine's own loader with all that it does afterwards, as for ``map_engine``.
        name: engine, release, model and place in the engine's mesh, in one line.
        rank, size: the worker's number among all workers of this engine, and how many there are.
        hidden: why a map would miss some weights, such as those that a kernel keeps outside of torch's tensors. Then
            the loader takes all weights in each round. Empty for most engines.

    Raises:
        TransferError: when an argument is wrong.

    Example:
        >>> model = torch.nn.Linear(48, 96, bias=False)
        >>> load = lambda pairs: model.weight.data.copy_(dict(pairs)["lm_head.weight"])
        >>> worker = engines.EngineWorker(model, load, name="example, worker 0 of 1")
        >>> # worker.receive(info)                        at each round, with what the trainer's call carries
    """

    def __init__(
        self, source: EngineModel, load: Loader, *, name: str, rank: int = 0, size: int = 1, hidden: str = ""
    ) -> None:
        require(
            TransferError,
            source=(source, _SOURCE),
            load=(load, FUNCTION),
            name=(name, instance_of("a line of text", str, advice="name the engine's rank")),
            rank=(rank, LEAST_0),
            size=(size, COUNT),
        )
        self._source, self._load = source, load
        self._name, self._rank, self._size, self._hidden = name, rank, size, hidden
        self._control: Connection | None = None
        self._data: Connection | None = None
        self._address: Address | None = None
        self._engine: MappedEngine | None = None
        self._puller: Puller | None = None
        self._receiver: Receiver | None = None
        self._guest: Guest | None = None
        self._comparison: MapComparison

    @cached_property
    def device(self) -> torch.device:
        """The device of the engine's tensors."""
        return device_of(self._source)

    @torch.no_grad()
    def receive(self, info: Mapping[str, Any]) -> None:
        """Take part in one round. Returns when this worker has the new weights.

        Args:
            info: what the trainer's call carries.

        Raises:
            TransferError: when the round failed, here or elsewhere. The weights may then be half old and half new.
        """
        require(TransferError, info=(info, MAPPING))
        invitation = Invitation.from_json(info)
        identity = self._identity(invitation.engine)
        if self._address != invitation.address:
            self.close()
            self._control, self._address = invitation.address.dial(), invitation.address
        assert self._control is not None
        try:
            tell(self._control, (identity, self._data is not None))
            if self._engine is not None:
                self._engine.look_ahead()
            problem = self._take_part(self._control, identity, invitation.seconds)
        except (OSError, EOFError) as error:
            self.close()
            raise TransferError(f"the trainer ended in the middle of a round ({error!r}); send a whole round") from None
        if problem:
            self._part()
            raise TransferError(problem)

    def _identity(self, engine: int) -> Identity:
        return Identity(engine, self._name, self._rank, self._size, this_machine(), gpu_of(self.device))

    def _take_part(self, control: Connection, identity: Identity, seconds: float) -> str:
        """Do what the trainer asks until the round ends; what went wrong in it, or an empty string."""
        while True:
            ready: list[Any] = wait([control, *filter(None, [self._data])], seconds)
            if not ready:
                self.close()
                raise TransferError(f"expected the trainer to go on within {seconds:.0f} s, found that it did not")
            if control not in ready:
                try:
                    method, arguments = ready[0].recv()
                    tell(ready[0], self._answer(method, arguments))
                except (OSError, EOFError):  # the trainer no longer serves this worker as it did
                    self._part()
                continue
            kind, value = control.recv()
            if kind == "end":
                return str(value)
            if value is not None:
                self._part()
                self._data = value.dial()
                tell(self._data, identity.place)

    def _answer(self, method: str, arguments: Sequence[Any]) -> Any:
        try:
            return getattr(self, f"ask_{method}")(*arguments)
        except TransferError as error:
            return error
        except Exception as error:
            logger.exception("%s: %s", self._name, method)
            return TransferError(describe(error))

    def _part(self) -> None:
        """Forget the trainer rank that served this worker, and a round that did not end."""
        with suppress(Exception):
            if self._receiver is not None:
                self._receiver.restart()
            if self._engine is not None:
                self._engine.break_off()
        for part in (self._data, self._puller, self._receiver, self._guest):
            if part is not None:
                part.close()
        self._data = self._puller = self._receiver = self._guest = None

    def close(self) -> None:
        """Let go of the trainer and of all memory that is shared with it."""
        self._part()
        if self._control is not None:
            self._control.close()
        self._control = self._address = None

    # what a trainer asks --------------------------------------------------------------------------------------------

    def ask_map(self, specs: Sequence[TensorSpec]) -> EngineMap:
        """Make a map for these HF tensors, or prove one that was kept."""
        if self._hidden:
            raise TransferError(self._hidden)
        path = _cache() / f"{hashlib.sha256(repr((self._name, *specs)).encode()).hexdigest()}.map"
        kept = None
        if path.exists():
            try:
                kept = EngineMap.load(path)
            except TransferError as error:
                logger.warning("%s. A new map is made now", error)
        self._engine = map_engine(specs, self._source, self._load, engine=self._name, kept=kept)
        if self._engine.map is not kept:
            _save(self._engine.map, path)
        return self._engine.map

    def ask_loader(self, specs: Sequence[TensorSpec]) -> None:
        """Take whole HF tensors by the engine's loader from now on."""
        self._engine = engine_without_map(specs, self._source, self._load, self._name)

    def ask_share(self) -> tuple[Handle, ...] | None:
        """Announce a round in which the trainer writes into the engine's memory."""
        assert self._engine is not None
        return self._engine.share()

    def ask_more_handles(self, count: int) -> list[list[Handle]]:
        """Let further ranks of the trainer write into the engine's memory."""
        assert self._engine is not None
        return self._engine.more_handles(count)

    def ask_pull(self, specs: Sequence[TensorSpec], handles: Sequence[Handle]) -> bool:
        """Copy out of the trainer's memory from now on, if this process can open it; and whether it can encode."""
        assert self._engine is not None
        self._puller = Puller(self._engine, specs, self.device)
        self._puller.announce()  # a map that cannot be used refuses now, so that a ring is tried
        self._puller.open(handles)
        return self._puller.can_encode

    def ask_pull_announce(self) -> None:
        """Announce a round in which this process copies out of the trainer's memory."""
        assert self._puller is not None
        self._puller.announce()

    def ask_pull_make_by(self, sender: int, maker: PlacedMaker) -> None:
        """Make codes and scales of a sender by ``maker`` from now on."""
        assert self._puller is not None
        self._puller.make_by(sender, maker)

    def ask_pull_learn(self, sender: int, handle: Handle) -> None:
        """Learn what a sender has written for this process."""
        assert self._puller is not None
        self._puller.learn(sender, handle)

    def ask_pull_begin(self, sender: int, handles: Sequence[Handle], layout: AllocationLayout | None) -> None:
        """Open the memory of a sender."""
        assert self._puller is not None
        self._puller.begin(sender, handles, layout)

    def ask_pull_make(self, sender: int) -> None:
        """Encode the weights of a sender."""
        assert self._puller is not None
        self._puller.make(sender)

    def ask_pull_done(self) -> dict[int, tuple[int, int]]:
        """Wait until everything is copied; what could not be made of each sender."""
        assert self._puller is not None
        return self._puller.done()

    def ask_pull_copy(self, sender: int, number: int, table: Table | None, windows: int, handle: Handle | None) -> None:
        """Run copies out of the memory of a sender."""
        assert self._puller is not None
        self._puller.copy(sender, number, table, windows, handle)

    def ask_pull_write(self, group: Sequence[tuple[TensorSpec, bytes]]) -> None:
        """Take HF tensors."""
        assert self._puller is not None
        self._puller.write(group)

    def ask_ring(self, plan: BucketPlan, handles: Sequence[Handle]) -> None:
        """Open the trainer's slots."""
        self._receiver = Receiver(plan, handles)

    def ask_join(self, host: str, port: int, rank: int, size: int, seconds: float) -> None:
        """Take rounds as a member of a group with all ranks of the trainer's replica."""
        from mcore_bridge.engines.guest import Guest
        from mcore_bridge.engines.joint_group import JointGroup, open_store

        assert self._engine is not None
        assert self._data is not None
        if self._guest is not None:
            self._guest.close()
        store = open_store(host, seconds, port)
        self._guest = Guest(self._engine, JointGroup(store, rank, size, self.device, seconds, [self._data]))

    def ask_follow(self, program: Program) -> None:
        """Take these steps in each round."""
        assert self._guest is not None
        self._guest.follow(program)

    def ask_exchange(self, version: int, compares: bool) -> Compared | None:
        """Take a round as a member of the group, or only compare it; what was found."""
        assert self._guest is not None
        assert self._engine is not None
        if not compares:
            self._guest.exchange(version, self._engine)
            self._synchronize()
            return None
        if not self._engine.map.copies:  # its loader takes all weights
            self._guest.exchange(version, None)
            return None
        self._comparison = MapComparison(self._engine.map, self._source)
        self._guest.exchange(version, self._comparison)
        return self._comparison.result

    def ask_bucket(self, number: int, compares: bool = False) -> None:
        """Take a bucket out of its slot, or only compare it."""
        assert self._receiver is not None
        assert self._engine is not None
        if compares and number == 0:
            self._engine.require_whole()
            self._comparison = MapComparison(self._engine.map, self._source)
        self._receiver.copy_into(number, self._comparison if compares else self._engine)

    def ask_compared(self, closes: bool) -> Compared:
        """All buckets were compared; what was found.

        Args:
            closes: whether the slots are no longer needed.
        """
        assert self._receiver is not None
        self._receiver.finish()
        if closes:
            self._receiver.close()
            self._receiver = None
        return self._comparison.result

    def ask_finish(self, version: int) -> None:
        """All buckets have come."""
        assert self._receiver is not None
        self._receiver.finish(version)
        self._synchronize()

    def ask_complete(self, version: int) -> None:
        """The trainer has written everything."""
        assert self._engine is not None
        if self._puller is not None:
            self._puller.close()
        self._engine.complete(version)
        self._synchronize()

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # whichever stream the engine computes on next


def worker_name(release: str, model: nn.Module, config: Any, place: str, settings: str = "") -> str:
    """The name of a worker. Kept maps belong to it, so it differs if the fields of the HF config or settings differ.

    An engine may have put objects into the config, even the config itself. Their classes count.
    """
    fields = sorted(config.to_dict().items(), key=str) if hasattr(config, "to_dict") else []
    described = json.dumps(fields, skipkeys=True, default=lambda value: type(value).__name__)
    digest = hashlib.sha256(f"{described} {settings}".encode()).hexdigest()
    return f"{release}, {type(model).__name__} {digest[:12]}, {place}"


def _cache() -> Path:
    root = os.environ.get(CACHE) or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mcore_bridge"
    return Path(root) / "maps"


def _save(engine_map: EngineMap, path: Path) -> None:
    """Keep a map; several workers may write the same one."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            engine_map.save(Path(folder) / path.name)
            os.replace(Path(folder) / path.name, path)
    except OSError as error:
        logger.warning("the map is not kept in %s: %s", path.parent, error)
