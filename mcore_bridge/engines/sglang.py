"""SGLang's side of a weight sync: a function that its ``update_weights_from_tensor`` calls in each scheduler.

    engine = sglang.Engine(..., custom_weight_loader=["mcore_bridge.engines.sglang.load"])
    sync = mb.WeightSync(models, mcore_bridge.engines.sglang.client(engine))

This module imports nothing of SGLang before a scheduler calls ``load``.
"""

from __future__ import annotations

import json
import logging
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mcore_bridge.engines.engine_worker import EngineWorker, worker_name
from mcore_bridge.errors import TransferError, describe
from mcore_bridge.foreign_files import parse

logger = logging.getLogger(__name__)
LOAD = "mcore_bridge.engines.sglang.load"
"""The ``load_format``, which SGLang's ``custom_weight_loader`` must list."""
_NAME = "mcore_bridge "
"""What the name of the only tensor begins with. The rest of the name is the message."""
_last = [""]
"""The call in which ``load`` ran last. SGLang runs it for its model first, and then for draft models."""


class Client:
    """Brings a round to SGLang's schedulers, and asks SGLang for log-probabilities."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def __call__(self, info: Mapping[str, Any], version: int | None = None) -> None:
        """Have each scheduler take part in a round.

        Args:
            version: what SGLang reports as its ``weight_version`` afterwards, if the engine is an ``Engine``.
        """
        with tempfile.TemporaryDirectory() as folder:
            # The message is a name: only children of this process could open the memory of a CPU tensor
            message = _NAME + json.dumps({"info": dict(info), "folder": folder})
            self._ask("begin_weight_update", selector="target")
            try:
                pairs = [(message, torch.empty(0))]
                self._ask("update_weights_from_tensor", named_tensors=pairs, load_format=LOAD, flush_cache=True)
            finally:
                self._ask("end_weight_update")
            for path in sorted(Path(folder).iterdir()):
                raise TransferError(f"expected SGLang to take the weights, found that it did not: {path.read_text()}")
        manager: Any = getattr(self._engine, "tokenizer_manager", None)
        if version is not None and hasattr(manager, "update_weight_version"):
            from sglang.srt.managers.io_struct import UpdateWeightVersionReqInput

            request = UpdateWeightVersionReqInput(new_version=str(version), abort_all_requests=False)
            self._engine.loop.run_until_complete(manager.update_weight_version(request))

    def _ask(self, name: str, **arguments: Any) -> None:
        """Call a method of the engine, if it has it: SGLang has some only since its updates have a begin and an end."""
        method = getattr(self._engine, name, None)
        answer = (True, "") if method is None else method(**arguments)
        if isinstance(answer, dict):  # from a server of SGLang
            answer = answer.get("success", True), answer.get("message", "")
        if isinstance(answer, tuple) and not answer[0]:
            raise TransferError(f"expected SGLang to take the weights, found that it did not: {answer[1]}")

    def log_probs(self, prompts: Sequence[Sequence[int]]) -> list[list[float]]:
        """The log-probability of each token of each prompt but its first."""
        answers = self._engine.generate(
            input_ids=[[*prompt] for prompt in prompts],
            sampling_params={"max_new_tokens": 1, "temperature": 0},
            return_logprob=True,
            logprob_start_len=0,
        )
        return [[float(entry[0]) for entry in answer["meta_info"]["input_token_logprobs"][1:]] for answer in answers]


def client(engine: Any) -> Client:
    """The client of an engine, for ``WeightSync``.

    Args:
        engine: SGLang's ``Engine``, or what has its ``begin_weight_update``, ``update_weights_from_tensor``,
            ``end_weight_update`` and ``generate``.
    """
    return Client(engine)


def load(model: nn.Module, named_tensors: Sequence[tuple[str, Tensor]]) -> None:
    """What SGLang calls: take part in a round of a ``WeightSync``.

    A round that fails raises nothing here, since SGLang ends an engine and its parent when a loader raises. The trainer
    and the client know of it.
    """
    names = [name for name, _ in named_tensors]
    if len(names) != 1 or not names[0].startswith(_NAME):
        raise TransferError(
            f"expected a message of a WeightSync, found {len(names)} tensors: {', '.join(names[:3])}; use another "
            "load_format"
        )
    message = parse(names[0].removeprefix(_NAME).encode())
    if message["folder"] == _last[0]:
        logger.info("a draft model keeps its weights: a WeightSync sends those of the policy to SGLang")
        return
    _last[0] = message["folder"]
    try:
        _worker_of(model).receive(message["info"])
    except Exception as error:
        logger.warning("a round of a WeightSync failed", exc_info=True)
        if not isinstance(error, TransferError):  # of a failed import, or a mistake of ours: the trainer must not wait
            with suppress(Exception):
                _worker_of(model).close()
        with suppress(OSError):  # the client may be on another machine, as if SGLang has several
            Path(tempfile.mkstemp(dir=message["folder"])[1]).write_text(describe(error))


@cache
def _worker_of(model: nn.Module) -> EngineWorker:
    import sglang
    from sglang.srt.distributed.parallel_state import get_pp_group, get_tp_group, get_world_group

    tp, pp, world = get_tp_group(), get_pp_group(), get_world_group()
    if pp.world_size > 1:  # a round needs all workers at once, and would wait in vain
        raise TransferError(
            f"expected SGLang without pipeline stages, found {pp.world_size}: it hands an update to a stage only after "
            "the stage before has ended it; use tp_size and ep_size"
        )
    config, place = getattr(model, "config", None), f"tp {tp.rank_in_group} of {tp.world_size}"
    name = worker_name(f"sglang {sglang.__version__}", model, config, place)

    def loader(pairs: Iterable[tuple[str, Tensor]]) -> None:
        model.load_weights(pairs)  # type: ignore[operator]

    return EngineWorker(model, loader, name=name, rank=world.rank_in_group, size=world.world_size)
