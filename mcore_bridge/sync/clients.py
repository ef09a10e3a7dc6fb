"""How a trainer calls an engine: each kind of client becomes a function by which all workers of an engine receive."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from typing import Any

from mcore_bridge.engines.vllm import Extension
from mcore_bridge.errors import TransferError, shown

Call = Callable[[Mapping[str, Any], int], object]
"""Has every worker of an engine run ``EngineWorker.receive(info)``, and returns when all of them have returned. The
second argument is the version of the weights."""

_FOUR = ("init_weight_transfer_engine", "start_weight_update", "update_weights", "finish_weight_update")
"""The methods of vLLM's clients."""


def call_of(engine: object) -> Call:
    """The function for a client.

    Args:
        engine: an ``LLM`` of vLLM, or one of vLLM's clients, which have the method ``update_weights``. Or the address
            of a vLLM server, such as ``"http://node7:8000"``. Or a ``multiprocessing`` connection: the process behind
            it calls ``EngineWorker.receive``, and answers with None or an exception. Or a function of ``info``.

    Raises:
        TransferError: for anything else.
    """
    if isinstance(engine, str):
        return _server(engine)
    if hasattr(engine, "collective_rpc"):
        return _in_process(engine)
    if all(hasattr(engine, name) for name in _FOUR):
        return _client(engine)
    if hasattr(engine, "send") and hasattr(engine, "recv"):
        return _pipe(engine)
    if callable(engine):
        return lambda info, version: engine(info)
    raise TransferError(
        "expected an engine: vLLM's LLM or one of its clients, the address of a server, a connection or a function; "
        f"found {shown(engine)}"
    )


def _in_process(llm: Any) -> Call:
    def call(info: Mapping[str, Any], version: int) -> None:
        if getattr(llm.llm_engine.vllm_config, "weight_transfer_config", None) is None:
            llm.collective_rpc(Extension.receive_from_trainer.__name__, args=(dict(info),))
        else:
            llm.start_weight_update()
            llm.update_weights({"update_info": dict(info)})
            llm.finish_weight_update()
        llm.reset_prefix_cache()
        for name in ("reset_mm_cache", "reset_encoder_cache"):  # what towers made of images with older weights
            getattr(llm.llm_engine, name, lambda: None)()
        getattr(llm.llm_engine, "set_weight_version", lambda text: None)(str(version))

    return call


def _client(client: Any) -> Call:
    def call(info: Mapping[str, Any], version: int) -> None:
        client.start_weight_update()
        client.update_weights(dict(info))
        client.finish_weight_update(str(version))

    return call


def _pipe(pipe: Any) -> Call:
    def call(info: Mapping[str, Any], version: int) -> None:
        pipe.send(dict(info))
        answer = pipe.recv()
        if isinstance(answer, Exception):
            raise answer

    return call


def _server(address: str) -> Call:
    def post(path: str, body: Mapping[str, Any] | None, seconds: float) -> None:
        request = urllib.request.Request(
            f"{address.rstrip('/')}/{path}",
            data=json.dumps(body or {}).encode(),
            headers={"Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=seconds):
                pass
        except urllib.error.HTTPError as error:
            text = error.read(2000).decode(errors="replace")
            raise TransferError(f"{request.full_url} answered {error.code}: {text}") from None
        except OSError as error:
            raise TransferError(f"expected a vLLM server at {address}, found none ({error})") from None

    def call(info: Mapping[str, Any], version: int) -> None:
        seconds = 2 * float(info["seconds"])
        post("start_weight_update", None, seconds)
        post("update_weights", {"update_info": dict(info)}, seconds)
        post("finish_weight_update", {"weight_version": str(version)}, seconds)
        for cache in ("reset_prefix_cache", "reset_mm_cache", "reset_encoder_cache"):
            post(cache, None, seconds)

    return call
