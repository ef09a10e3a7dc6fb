"""``WeightSync``: the weights of a model into all its engines, each by the fastest way that works, at every step."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from threading import TIMEOUT_MAX
from types import TracebackType
from typing import Any

import torch

from mcore_bridge.arguments import FLAG, LEAST_0, Kind, accepts_former_names, problem_of, require
from mcore_bridge.config.layer_kinds import held_mtp_layers
from mcore_bridge.config.quantization import Quantize
from mcore_bridge.engines.channel import HANDSHAKE, Listener, WorkerLine, own_host
from mcore_bridge.engines.engine_worker import Identity
from mcore_bridge.engines.vllm import Draft
from mcore_bridge.errors import TransferError, describe, plural
from mcore_bridge.machine import this_machine, uncollected
from mcore_bridge.rules.mapping import ExpertFormat
from mcore_bridge.sync.clients import call_of
from mcore_bridge.sync.elsewhere import Answer, Elsewhere
from mcore_bridge.sync.reports import SyncReport, Target, VerifyReport, WorkerReport, WorkerWeights
from mcore_bridge.sync.roll_call import Place, RollCall, Served
from mcore_bridge.sync.routes import ACROSS, WAYS, NoRoute, Route, Transport, WorkerKey
from mcore_bridge.sync.verification import ALL_GO_ON, asked, differences_of, given_by_first
from mcore_bridge.weights.engine.across_ranks import AcrossRanks
from mcore_bridge.weights.engine.comparison import Compared
from mcore_bridge.weights.ipc.shared_memory import gpu_of
from mcore_bridge.weights.manifest import Manifest, manifest
from mcore_bridge.weights.model_chunks import Models, chunks_of, modules_of
from mcore_bridge.weights.transfer.collectives import Group
from mcore_bridge.weights.transfer.failures import raise_failures, raise_on_all

_SYNC_FIRST = "expected an engine with weights of this trainer, found a new one: sync first"
_SECONDS = Kind(
    f"a number of seconds above 0 and up to {TIMEOUT_MAX:.0f}",
    lambda value: isinstance(value, int | float) and 0 < value <= TIMEOUT_MAX,
    "pass a number such as 600",
)
_HOST = Kind(
    "a name or number of this machine", lambda value: isinstance(value, str) and value != "", "pass its IP address"
)
_TRANSPORT = Kind(
    f"one of {', '.join(WAYS)}, or None", lambda value: value is None or value in WAYS, "pass one of them"
)


@dataclass(frozen=True, slots=True)
class _Outcome:
    """What came of one worker in a round, as the trainer rank that serves it has seen it."""

    worker: Identity
    trainer: int
    transport: Transport | None
    reason: str
    num_bytes: int
    seconds: float
    sibling: WorkerKey | None
    compared: Compared | None
    problem: str
    target: Target

    def report(self) -> WorkerReport:
        """After a sync."""
        worker = self.worker
        figures = self.transport, self.reason, self.num_bytes, self.seconds, self.sibling, self.problem
        return WorkerReport(worker.engine, worker.rank, worker.name, self.trainer, *figures, self.target)

    def weights(self) -> WorkerWeights:
        """After a comparison."""
        worker = self.worker
        return WorkerWeights(worker.engine, worker.rank, worker.name, self.compared, self.problem, self.target)


@dataclass(frozen=True, slots=True)
class _Round:
    """What came of a round, equal on all ranks."""

    version: int
    target: Target
    outcomes: Sequence[_Outcome]
    """Of each worker that took part."""
    absent: Mapping[int, str]
    """Why engines failed in their own way."""

    @property
    def failed(self) -> set[int]:
        """The engines that do not have all weights."""
        return {*self.absent, *(outcome.worker.engine for outcome in self.outcomes if outcome.problem)}

    def problems(self) -> list[str]:
        """A line for each failure."""
        draft = "the draft model of " if self.target == "draft" else ""
        wrong = [f"{draft}{outcome.worker}: {outcome.problem}" for outcome in self.outcomes if outcome.problem]
        return wrong + [f"{draft}engine {engine}: {reason}" for engine, reason in sorted(self.absent.items())]


@accepts_former_names
class WeightSync:
    """The engines of a trainer. Each call sends all weights to all of them.

    Every rank of the trainer makes one, and calls it at each step. Rank 0 calls the engines, whose workers then connect
    to the trainer. Each worker is served by the nearest trainer rank: on the same GPU, on the same machine, or
    elsewhere. In the first round a map of each engine's loader is made, which takes some reloads, or a kept one is
    proven. The environment variable MCORE_BRIDGE_CACHE names the folder of kept maps.

    Args:
        models: this rank's chunks, wrapped or not.
        engines: one client or a list, on rank 0; other ranks may pass nothing. A client is an ``LLM`` of vLLM, or one
            of vLLM's clients for weight transfer, or the address of a vLLM server. It may also be a connection to a
            process that calls ``EngineWorker.receive``, or a function of ``info`` that has all workers call it.
        drafts: what the draft model of every engine gets in the same call: the result of ``build_draft``, or ``models``
            once more if engines draft with MTP layers. vLLM needs nothing else. Another client has a method ``draft``,
            which is a function of ``info`` for the workers of the draft model.
        transport: the only way to use, for a test or a measurement; None chooses for each worker.
        loads: whether engines take weights by their own loaders, without a map.
        address: the number under which engines reach this rank's machine; None finds it.
        timeout: seconds that an engine may take for one answer. The first round makes maps within one answer.
        expert_format, merged, quantize: of ``models``, as for ``iter_hf_weights``. An engine of an FP8 folder takes
            "as_published".

    Raises:
        TransferError: on every rank, when an argument is wrong on one.

    Example:
        >>> from mcore_bridge.engines import EngineWorker
        >>> model = torch.nn.Linear(48, 96, bias=False)               # an engine with one worker, in this process
        >>> load = lambda pairs: model.weight.data.copy_(dict(pairs)["lm_head.weight"])
        >>> worker = EngineWorker(model, load, name="example, worker 0 of 1")
        >>> sync = mb.WeightSync(models, worker.receive)
        >>> report = sync()
        >>> report.version, report.workers[0].transport
        (1, 'ring')
        >>> print(sync.verify(weights=True))                              # with prompts it compares log-probs too
        version 1, worker 0 of engine 0: 1 tensors equal in every bit
        >>> sync.close()
        >>> torch.equal(model.weight, mb.to_hf_state_dict(models)["lm_head.weight"])
        True
    """

    def __init__(
        self,
        models: Models,
        engines: object = (),
        *,
        drafts: Models | None = None,
        transport: Transport | None = None,
        loads: bool = False,
        address: str | None = None,
        timeout: float = 600.0,
        expert_format: ExpertFormat | None = None,
        merged: bool | None = None,
        quantize: Quantize = None,
    ) -> None:
        self._models, self._loads, self._seconds = models, loads, timeout
        self._allowed: tuple[Transport, ...] = WAYS if transport is None else (transport,)
        self._options: dict[str, Any] = {"expert_format": expert_format, "merged": merged, "quantize": quantize}
        self._group = Group.of_trainer()
        how: Any = {"transport": transport, "loads": loads, "address": address, "timeout": timeout}
        self._target: Target = "policy"
        self._draft = self._of_drafts(drafts, how | (self._options if drafts == models else {}))
        self._routes: dict[WorkerKey, Route] = {}
        self._across: dict[int, AcrossRanks] = {}
        """Of each row of near workers, which has one of each rank at most."""
        self._roster: list[WorkerKey] = []
        """The workers of the last round."""
        self._ways_of_ranks: list[tuple[list[Transport | None], bool, bool]] | None = None
        """What the ranks said of these workers, if none of them is elsewhere."""
        self._roll_call: RollCall | None = None
        self.version = self._begun = 0
        """The version of the last round that did not fail."""
        wrong = problem_of(
            transport=(transport, _TRANSPORT),
            loads=(loads, FLAG),
            address=(address, _HOST.or_none()),
            timeout=(timeout, _SECONDS),
        )
        self._clients: dict[int, object] = {}
        self._numbers = count()
        self._is_closed = False
        with raise_on_all(self._group, ALL_GO_ON, TransferError):
            chunks_of(models)
            if wrong:
                raise TransferError(wrong)
            self._host = address or own_host()
            self._listener = Listener(self._host)
            if self._group.rank == 0:
                self._roll_call = RollCall({}, self._listener, timeout)
                self.set_engines(engines)
        self._device = self._own_device()
        own = Place(this_machine(), gpu_of(self._device), self._listener.address)
        places = self._group.all_gather_object(own)
        if self._roll_call is not None:
            self._roll_call.places = places
        self._specs = tuple(manifest(models, **self._options))
        self._idle = NoRoute(models, self._options)
        self._elsewhere = Elsewhere(models, self._options, self._device, self._host, timeout)
        machines = [places[member].machine for member in self._elsewhere.members]
        self._is_together = len(machines) > 1 and len({*machines}) == 1 and "" not in machines
        """Whether this rank's replica has other ranks, all on one machine."""

    def set_engines(self, engines: object) -> None:
        """Serve these engines from the next round on: those that have come, and no longer those that have gone.

        Only rank 0 calls this. An engine that was served before keeps its connections.

        Args:
            engines: one client or a list, as for ``WeightSync``.

        Raises:
            TransferError: when one of them is no client, or the ``WeightSync`` is closed.
        """
        self._require_open()
        if self._roll_call is None:
            raise TransferError(f"expected rank 0 to name the engines, found rank {self._group.rank}")
        clients, given = {}, list(engines) if isinstance(engines, list | tuple) else [engines]
        if twice := [number for number, engine in enumerate(given) if engine in given[:number]]:
            raise TransferError(f"expected each engine once, found engine {twice[0]} of the list once more: remove it")
        for engine in given:
            known = next((number for number, client in self._clients.items() if client == engine), None)
            clients[next(self._numbers) if known is None else known] = engine
        calls = {number: call_of(engine) for number, engine in clients.items()}
        if self._draft is not None and self._draft._roll_call is not None:
            self._draft._roll_call.calls = {number: call_of(Draft(engine)) for number, engine in clients.items()}
        self._roll_call.calls, self._clients = calls, clients

    def _of_drafts(self, drafts: Models | None, how: Mapping[str, Any]) -> WeightSync | None:
        """The part that serves the draft models of all engines. All ranks have it, or none."""
        have = self._group.all_gather_object(drafts is not None)
        if len({*have}) > 1:
            raise TransferError(
                f"expected drafts on all ranks or on none, found them on {have.count(True)} of {len(have)}: pass the "
                "same on every rank"
            )
        if drafts is None:
            return None
        with raise_on_all(self._group, ALL_GO_ON, TransferError):
            chunks = chunks_of(drafts)
            if chunks == chunks_of(self._models) and not held_mtp_layers(vars(chunks[0].config)):
                raise TransferError(
                    "drafts=models means MTP layers of these models, found none: build them with "
                    'overrides={"mtp_num_layers": 1}, or pass what build_draft returns'
                )
        sync = WeightSync(drafts, **how)
        sync._target = "draft"
        return sync

    @uncollected()
    def __call__(self, version: int | None = None) -> SyncReport:
        """Send all weights to all engines. All ranks of the trainer call this together.

        Draft models come first. An engine whose draft model has failed keeps the weights of its policy, and reports no
        new version.

        Args:
            version: a number for these weights, which the engines report; None counts rounds, also those that fail.
                That of rank 0 counts.

        Returns:
            Version, seconds, and a report of each worker, equal on all ranks but for ``seconds``.

        Raises:
            TransferError: on every rank, when an engine did not get all weights, of its policy and of its draft model.
                The message names engine, worker and cause. If its workers took part in the round, the weights of this
                engine are then half old and half new; other engines have the new ones. The next call sends everything
                again. A closed ``WeightSync`` raises, too.
            ExportError, MappingError: as ``iter_hf_weights``.
        """
        self._require_open()
        start = time.perf_counter()
        rounds = self._rounds(version, start, compares=False)
        self._set_version(rounds[0].version)
        reports = tuple(outcome.report() for done in rounds for outcome in done.outcomes)
        return SyncReport(self.version, time.perf_counter() - start, reports)

    def _set_version(self, version: int) -> None:
        self.version = self._begun = version
        if self._draft is not None:
            self._draft._set_version(version)

    def verify(
        self,
        prompts: object = (),
        log_probs: object = None,
        *,
        weights: bool = False,
        atol: float | None = None,
        **options: Any,
    ) -> VerifyReport:
        """Compare the engines with the trainer: log-probabilities of prompts, and bits of weights. Nothing changes.

        All ranks of the trainer call this together. The arguments of rank 0 count, except for ``options``. Call it
        between a round and the next step of the optimizer, since the trainer has other weights afterwards.

        Args:
            prompts: lists of token ids, or int64 ``[batch, seq]`` without padding. A prompt may include a response.
            log_probs: what an engine says of the prompts: for each prompt a row of log-probabilities, which belong to
                its last tokens. So a rollout's own log-probabilities of a response fit. Or a function of the prompts
                that returns these rows. None: vLLM's ``LLM`` or server is asked, or SGLang, or any client that has
                such a function as its method ``log_probs``.
            weights: whether to compare every bit of every tensor too. This takes about as long as a round.
            atol: raise if a log-probability is further apart, or if a weight differs.
            options: further arguments of ``forward``, such as ``temperature``, ``images`` and ``micro_batch_size``. The
                latter is 1 by default.

        Returns:
            The differences of each engine and worker. ``print`` shows a line for each.

        Raises:
            TransferError: on every rank. An engine gives no log-probabilities, or other values. ``atol`` is exceeded;
                the message has the lines of the report. A worker cannot compare its weights, as before its first round.
                The ``WeightSync`` is closed.
            BatchError: as ``forward``.

        Example:
            >>> print(sync.verify([[3, 14, 15, 92], [65, 35]], atol=0.1))    # docs/guide/sync.md shows what it prints
        """
        self._require_open()
        ask = partial(asked, self._clients, prompts, log_probs, weights, atol, self._seconds)
        given = given_by_first(self._group, ask)
        differences = differences_of(self._group, self._models, given, self._options["merged"] is False, options)
        rounds = self._rounds(self.version, time.perf_counter(), compares=True) if given.weights else []
        held = tuple(outcome.weights() for done in rounds for outcome in done.outcomes)
        return VerifyReport(self.version, differences, held).within(given.atol)

    def _rounds(self, version: int | None, start: float, *, compares: bool) -> list[_Round]:
        """The round of the policy, after the round of draft models if there are any.

        Raises:
            TransferError: on every rank, when it failed for any engine.
        """
        rounds: list[_Round] = []
        for part in (self._draft, self):
            if part is not None:
                left_out = {engine for done in rounds for engine in done.failed}
                version = rounds[0].version if rounds else version
                rounds.append(part._round(version, start, left_out, compares=compares))
        if any(done.failed for done in rounds):
            raise TransferError(_failures(rounds, compares))
        return rounds

    def _round(self, version: int | None, start: float, left_out: Collection[int], *, compares: bool) -> _Round:
        """Call all engines but those left out, and export to each worker, or compare.

        Raises:
            TransferError: on every rank, when it failed on a rank for all engines.
        """
        version, roster, absent = self._called(version, left_out)
        if not compares:  # if it fails, some engines may have the weights of this version
            self._begun = version
        mine = [served.worker for served in roster if served.trainer == self._group.rank]
        new = [served for served in roster if served.is_new]
        mine_new = [served.worker for served in new if served.trainer == self._group.rank]
        staying = {worker.place for worker in mine} - {worker.place for worker in mine_new}
        self._close_all({*self._routes} - staying)
        workers = [served.worker.place for served in roster]
        if new or workers != self._roster:
            self._roster, self._ways_of_ranks = workers, None
        outcomes: list[_Outcome] = []
        failure = None
        try:
            rows = max(Counter(served.trainer for served in new).values(), default=0)
            problems = self._opened(mine_new, rows, compares)
            answers = self._exchanged(problems, version, compares)
            outcomes = [self._outcome(worker, *answers[worker.place], start) for worker in mine]
        except Exception as error:
            failure = error
        problem = "" if failure is None else describe(failure)
        gathered = self._group.all_gather_object((outcomes, problem))
        outcomes = [outcome for of_rank, _ in gathered for outcome in of_rank]
        outcomes.sort(key=lambda outcome: outcome.worker.place)
        absent = {**self._ended(outcomes, [text for _, text in gathered], absent), **absent}
        if failure is not None:
            raise failure
        raise_failures([text for _, text in gathered], ALL_GO_ON, TransferError)
        return _Round(version, self._target, outcomes, absent)

    def _outcome(self, worker: Identity, answer: Answer, when: float, start: float) -> _Outcome:
        route = self._routes[worker.place]
        sibling = self._elsewhere.siblings.get(worker.place)
        figures = route.transport, route.reason, route.num_bytes, when - start, sibling
        if isinstance(answer, TransferError):
            problem = str(answer).replace(f"{worker}: ", "")  # the report names the worker
            return _Outcome(worker, self._group.rank, *figures, None, problem, self._target)
        return _Outcome(worker, self._group.rank, *figures, answer, "", self._target)

    def _called(self, version: int | None, left_out: Collection[int]) -> tuple[int, list[Served], dict[int, str]]:
        """The version of the round, the workers of all engines that have come, and why engines did not."""
        answer: tuple[int, list[Served], dict[int, str]] | str = ""
        if self._roll_call is not None:
            try:
                require(TransferError, version=(version, LEAST_0.or_none()))
                number = self._begun + 1 if version is None else version
                answer = (number, *self._roll_call.begin(number, left_out))
            except Exception as error:  # other ranks wait for it
                answer = describe(error)
        answer = self._group.all_gather_object(answer)[0]
        if isinstance(answer, str):
            raise TransferError(answer)
        return answer

    def _opened(self, new: Sequence[Identity], num_rows: int, compares: bool) -> dict[WorkerKey, TransferError]:
        """Connect workers that are new on this rank, and choose their transports; what went wrong for a worker.

        Args:
            num_rows: the most workers that are new on one rank. All ranks take part for each of them.
        """
        if num_rows:
            with raise_on_all(self._group, ALL_GO_ON, TransferError):
                self._connect(new)
        if compares:
            return {worker.place: TransferError(_SYNC_FIRST) for worker in new}
        problems = {}
        for row in range(num_rows):
            key = new[row].place if row < len(new) else None
            route = self._idle if key is None else self._routes[key]
            answer = _answer_of(partial(route.find, self._specs, self._loads))
            specs = self._manifest(route)
            answer = answer or _answer_of(partial(route.open, specs))
            if key is not None and isinstance(answer, TransferError):
                problems[key] = answer
        return problems

    def _connect(self, new: Sequence[Identity]) -> None:
        """Accept the workers that are new on this rank."""
        due = {worker.place: worker for worker in new}
        deadline = time.monotonic() + self._seconds
        while due:
            pipe = self._listener.accept(max(deadline - time.monotonic(), 0.0))
            if pipe is None and time.monotonic() > deadline:
                raise TransferError(
                    f"expected {[worker.name for worker in due.values()]} to connect to {self._host} within "
                    f"{self._seconds:.0f} s, found that they did not; pass an address that the engines reach"
                )
            if pipe is None or not pipe.poll(HANDSHAKE):
                continue
            worker = due.pop(pipe.recv())
            self._routes[worker.place] = Route(
                self._models,
                self._options,
                line=WorkerLine(pipe, str(worker), self._seconds),
                device=self._device,
                allowed=self._allowed,
                is_near=worker.is_on(this_machine()),
            )

    def _exchanged(
        self, problems: Mapping[WorkerKey, TransferError], version: int, compares: bool
    ) -> dict[WorkerKey, tuple[Answer, float]]:
        """One export into each worker of this rank, or a comparison with it: its answer, and when it came.

        All ranks take part: once for each row of near workers, and once for all workers elsewhere.
        """
        routes = {key: route for key, route in self._routes.items() if key not in problems}
        far = {key: route for key, route in routes.items() if route.transport == "network"}
        near = [key for key in routes if key not in far]
        ways = [routes[key].transport for key in near]
        ranks = self._ways_of_ranks
        if ranks is None:
            ranks = self._group.all_gather_object((ways, bool(far), self._elsewhere.has_changed(far)))
            self._ways_of_ranks = None if any(is_far or changes for _, is_far, changes in ranks) else ranks
        answers: dict[WorkerKey, tuple[Answer, float]] = {key: (e, time.perf_counter()) for key, e in problems.items()}
        num_rows = max(len(of_rank) for of_rank, *_ in ranks)
        ways_of = [
            {way for member in self._elsewhere.members for way in ranks[member][0][row : row + 1]}
            for row in range(num_rows)
        ]
        kinds = {
            row: ACROSS[way]
            for row, of_row in enumerate(ways_of)
            for way in of_row
            if self._is_together and len(of_row) == 1 and way in ACROSS
        }
        known = self._across
        self._across = {row: known[row] if type(known.get(row)) is kind else kind() for row, kind in kinds.items()}
        for row in range(num_rows):
            key = near[row] if row < len(near) else None
            route = self._idle if key is None else routes[key]
            send = partial(route.send, version, self._across.get(row))
            action = partial(route.compare, self._manifest(route)) if compares else send
            answer = _answer_of(action)
            if key is not None:
                answers[key] = answer, time.perf_counter()
        of_replica = [ranks[member][1:] for member in self._elsewhere.members]
        if any(map(any, of_replica)):
            is_new = any(has_changed for _, has_changed in of_replica)
            elsewhere = self._elsewhere.exchange(far, version, is_new=is_new, compares=compares)
            answers |= {key: (answer, time.perf_counter()) for key, answer in elsewhere.items()}
        return answers

    def _manifest(self, route: NoRoute) -> Manifest:
        return manifest(self._models, **self._options, target=route.target)

    def _ended(self, outcomes: Sequence[_Outcome], problems: Sequence[str], absent: dict[int, str]) -> dict[int, str]:
        """Tell all workers that the round has ended; which engines failed in their own way."""
        failed = {outcome.worker.engine: outcome.problem for outcome in outcomes if outcome.problem}
        self._close_all({place for place in self._routes if place[0] in failed or any(problems)})
        if failed or any(problems):  # the driver keeps the memory of an engine that another process has open
            self._across.clear()
        answer: dict[int, str] = {}
        if self._roll_call is not None:
            everywhere = next((text for text in problems if text), "")
            answer = self._roll_call.end(everywhere, {**absent, **failed})
        if self._group.most([bool(answer)])[0]:
            answer = self._group.all_gather_object(answer)[0]
        return {number: text for number, text in answer.items() if number not in failed}

    def _own_device(self) -> torch.device:
        on_gpu = torch.cuda.is_available() and any(
            p.is_cuda for chunk in modules_of(self._models) for p in chunk.parameters()
        )
        return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")

    def _close_all(self, places: Collection[WorkerKey]) -> None:
        for place in places:
            self._routes.pop(place).close()

    def _require_open(self) -> None:
        if self._is_closed:
            raise TransferError("expected an open WeightSync, found a closed one: make a new one")

    def close(self) -> None:
        """Let go of all engines. Afterwards only ``close`` can be called, and does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        self._elsewhere.close()
        self._close_all({*self._routes})
        self._across.clear()
        if self._roll_call is not None:
            self._roll_call.close()
        self._listener.close()
        self._group.close()
        if self._draft is not None:
            self._draft.close()

    def __enter__(self) -> WeightSync:
        """Close at the end of a block."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def _failures(rounds: Sequence[_Round], compares: bool) -> str:
    """What an error says of rounds that failed, and of engines whose workers took part in them."""
    wrong = [problem for done in rounds for problem in done.problems()]
    text = (
        f"expected all engines to have version {rounds[0].version}, found {plural(len(wrong), 'failure')}: "
        f"{'; '.join(wrong)}"
    )
    failed = {engine for done in rounds for engine in done.failed}
    changed = sorted({outcome.worker.engine for done in rounds for outcome in done.outcomes} & failed)
    if compares or not changed:
        return text
    who = f"engine {changed[0]}" if len(changed) == 1 else f"the engines {', '.join(map(str, changed))}"
    return f"{text}. The weights of {who} may be half old and half new: sync again before sampling"


def _answer_of(action: Callable[[], Compared | None]) -> Answer:
    """Run it. An error that one worker alone has is returned."""
    try:
        return action()
    except TransferError as error:
        return error
