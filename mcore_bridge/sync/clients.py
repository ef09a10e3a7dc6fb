"""How a trainer calls an engine: each kind of client becomes a function by which all workers of an engine receive."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from functools import partial
from inspect import signature
from typing import Any

from mcore_bridge.engines import sglang, vllm
from mcore_bridge.engines.channel import tell
from mcore_bridge.errors import TransferError, shown
from mcore_bridge.foreign_files import parse
from mcore_bridge.sync.log_probs import LogProbs, Prompts, Rows

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
            it calls ``EngineWorker.receive``, and answers with None or an exception. Or a function of ``info``. Or a
            ``Draft`` of one of vLLM's, or of what has a method ``draft``. A draft model reports no version.

    Raises:
        TransferError: for anything else, such as an address without ``http://``.
    """
    client, draft = (engine.engine, True) if isinstance(engine, vllm.Draft) else (engine, False)
    if isinstance(client, str):
        return _server(client, draft)
    if hasattr(client, "collective_rpc"):
        return partial(vllm.receive, client, draft=draft)
    if all(hasattr(client, name) for name in _FOUR):
        return _client(client, draft)
    if draft and hasattr(client, "draft"):
        receive = client.draft
        return lambda info, version: receive(info)
    if draft:
        raise TransferError(
            "expected an engine with a draft model: vLLM's LLM, one of its clients, the address of a server, or a "
            f"client with a method draft(info); found {shown(client)}"
        )
    if hasattr(engine, "send_bytes") and hasattr(engine, "recv"):
        return _pipe(engine)
    if isinstance(engine, sglang.Client):
        return engine
    if callable(engine):
        return lambda info, version: engine(info)
    raise TransferError(
        "expected an engine: vLLM's LLM or one of its clients, the address of a server, a connection or a function; "
        f"found {shown(engine)}. Pass [] for no engines"
    )


def _client(client: Any, draft: bool) -> Call:
    takes_version = not draft and bool(signature(client.finish_weight_update).parameters)  # since vLLM 0.27

    def call(info: Mapping[str, Any], version: int) -> None:
        getattr(client, vllm.STARTS[draft])()
        client.update_weights(dict(info))
        client.finish_weight_update(*([str(version)] if takes_version else []))

    return call


def _pipe(pipe: Any) -> Call:
    def call(info: Mapping[str, Any], version: int) -> None:
        tell(pipe, dict(info))
        answer = pipe.recv()
        if isinstance(answer, Exception):
            raise answer

    return call


def _server(address: str, draft: bool) -> Call:
    if not address.startswith(("http://", "https://")):
        named = address and "://" not in address
        raise TransferError(
            f"expected the address of a server with http:// or https://, found {shown(address)}: write "
            f"{f'http://{address}' if named else 'an address such as http://node7:8000'}"
        )

    def call(info: Mapping[str, Any], version: int) -> None:
        seconds = 2 * float(info["seconds"])
        _post(address, vllm.STARTS[draft], {}, seconds)
        _post(address, "update_weights", {"update_info": dict(info)}, seconds)
        _post(address, "finish_weight_update", {} if draft else {"weight_version": str(version)}, seconds)
        for cache in ("reset_prefix_cache", "reset_mm_cache", "reset_encoder_cache"):
            _post(address, cache, {}, seconds)

    return call


def _post(address: str, path: str, body: Mapping[str, Any], seconds: float) -> bytes:
    """Ask a server; its answer."""
    request = urllib.request.Request(
        f"{address.rstrip('/')}/{path}", data=json.dumps(body).encode(), headers={"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=seconds) as answer:
            return bytes(answer.read())
    except urllib.error.HTTPError as error:
        text = error.read(2000).decode(errors="replace")
        raise TransferError(f"{request.full_url} answered {error.code}: {text}") from None
    except OSError as error:
        raise TransferError(f"expected a vLLM server at {address}, found none ({error})") from None


# log-probabilities ----------------------------------------------------------------------------------------------------


def log_probs_of(engine: Any, seconds: float) -> LogProbs | None:
    """The function that asks a client for log-probabilities of prompts; None if the client has no way to ask.

    Args:
        engine: as for ``call_of``. A client may have a method ``log_probs``, which is this function.
        seconds: how long a server may take to answer.
    """
    if hasattr(engine, "log_probs"):
        function: LogProbs = engine.log_probs
        return function
    address = engine if isinstance(engine, str) else getattr(engine, "base_url", None)
    if isinstance(address, str):
        return partial(_completed, address, seconds=seconds)
    if hasattr(engine, "collective_rpc"):
        return partial(vllm.log_probs, engine)
    return None


def _completed(address: str, prompts: Prompts, seconds: float) -> Rows:
    """Ask a server of vLLM."""
    body = {"prompt": prompts, "max_tokens": 1, "temperature": 0, "prompt_logprobs": 0}
    answer = _post(address, "v1/completions", body, seconds)
    try:
        choices = sorted(parse(answer)["choices"], key=lambda choice: int(choice["index"]))
        rows = [choice["prompt_logprobs"][1:] for choice in choices]
        return [
            [float(ranked[str(token)]["logprob"]) for token, ranked in zip(prompt[1:], row, strict=True)]
            for prompt, row in zip(prompts, rows, strict=True)
        ]
    except (ValueError, TypeError, LookupError) as error:
        raise TransferError(
            f"expected log-probs of prompts from the server at {address}, found another answer ({error!r}): "
            f"{answer[:200].decode(errors='replace')}"
        ) from None
