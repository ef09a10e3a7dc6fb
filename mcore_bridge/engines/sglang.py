"""SGLang's side of a weight sync: a function that its ``update_weights_from_tensor`` calls in each scheduler.

    engine = sglang.Engine(..., custom_weight_loader=["mcore_bridge.engines.sglang.load"])
    sync = mb.WeightSync(models, mcore_bridge.engines.sglang.client(engine))

This module imports nothing of SGLang before a scheduler calls ``load``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from mcore_bridge.engines.engine_worker import EngineWorker
from mcore_bridge.errors import TransferError
from mcore_bridge.foreign_files import parse

LOAD = "mcore_bridge.engines.sglang.load"
"""The ``load_format``, which SGLang's ``custom_weight_loader`` must list."""
_NAME = "mcore_bridge"


class _Client:
    """Brings a round to SGLang's schedulers, and asks SGLang for log-probabilities."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def __call__(self, info: Mapping[str, Any]) -> None:
        """Have each scheduler take part in a round."""
        message = torch.frombuffer(bytearray(json.dumps(dict(info)).encode()), dtype=torch.uint8)
        answer = self._engine.update_weights_from_tensor([(_NAME, message)], load_format=LOAD, flush_cache=True)
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


def client(engine: Any) -> Callable[[Mapping[str, Any]], None]:
    """The client of an engine, for ``WeightSync``.

    Args:
        engine: SGLang's ``Engine``, or what has its ``update_weights_from_tensor`` and ``generate``.
    """
    return _Client(engine)


def load(model: nn.Module, named_tensors: Sequence[tuple[str, Tensor]]) -> None:
    """What SGLang calls: take part in a round of a ``WeightSync``."""
    ((name, message),) = named_tensors
    if name != _NAME:
        raise TransferError(f"expected a message of a WeightSync, found a tensor {name}; use another load_format")
    _worker_of(model).receive(parse(bytes(message.cpu().numpy())))


@cache
def _worker_of(model: nn.Module) -> EngineWorker:
    import sglang
    from sglang.srt.distributed import get_pp_group, get_tp_group, get_world_group

    tp, pp, world = get_tp_group(), get_pp_group(), get_world_group()
    place = f"tp {tp.rank_in_group} of {tp.world_size}, pp {pp.rank_in_group} of {pp.world_size}"
    config = getattr(model, "config", None)
    name = f"sglang {sglang.__version__}, {type(model).__name__} {config!r:.2000}, {place}"

    def loader(pairs: Iterable[tuple[str, Tensor]]) -> None:
        model.load_weights(pairs)  # type: ignore[operator]

    return EngineWorker(model, loader, name=name, rank=world.rank_in_group, size=world.world_size)
