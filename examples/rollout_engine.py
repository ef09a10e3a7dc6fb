"""A rollout engine in a process of its own: transformers' model, fed through shared buffers, asleep while others work.

Needs torch, transformers and ``mcore_bridge.Receiver``; no megatron-core. What it is asked for comes through a pipe as
``(method, arguments)``, and each answer goes back through it: a value, or the error that was raised. ``vllm_engine``
has an engine that is asked the same.
"""

from __future__ import annotations

import atexit
import multiprocessing
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor

import mcore_bridge as mb


class Engine:
    """Samples from a model whose weights somebody else owns.

    With ``by_map`` its loader runs only before the first weights come, to be read off as a map. From then on the map
    copies buckets into its parameters, without the loader.
    """

    def __init__(self, config: Mapping[str, Any], dtype: torch.dtype, device: str, by_map: bool = True) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

        fields = dict(config)
        hf = AutoConfig.for_model(fields.pop("model_type"), **fields)
        kind = AutoModelForImageTextToText if hasattr(hf, "vision_config") else AutoModelForCausalLM
        self._model = kind.from_config(hf, dtype=dtype, attn_implementation="sdpa").to(device).eval()
        self._weights = dict(self._model.named_parameters(remove_duplicate=False))
        self._shapes = {name: weight.shape for name, weight in self._weights.items()}
        self._device = device
        self._receiver: mb.Receiver | None = None
        self._by_map = by_map
        self._mapped: Any = None
        self.sleep()

    def sleep(self) -> None:
        """Give all memory of the weights back; what they were is lost."""
        for weight in self._weights.values():
            weight.data = weight.data.new_empty(0)
        if self._device != "cpu":
            torch.cuda.empty_cache()

    def wake(self) -> None:
        """Take memory for weights, with nothing in it that anybody could mistake for them."""
        for name, weight in self._weights.items():
            weight.data = torch.full(self._shapes[name], torch.nan, dtype=weight.dtype, device=self._device)
        self._model.tie_weights()

    def connect(self, plan: Any, handles: Any) -> None:
        """Open the buffers of the trainer beside this engine."""
        self._receiver = mb.Receiver(plan, handles)

    @torch.no_grad()
    def load_weights(self, pairs: Iterable[tuple[str, Tensor]]) -> None:
        """Take weights by their HF names, which transformers' model has as well."""
        for name, tensor in pairs:
            self._weights[name].copy_(tensor)

    def load(self, number: int) -> None:
        """Take the weights of a bucket out of its slot: by the map where there is one."""
        assert self._receiver is not None
        if not self._by_map:
            with self._receiver.open(number) as pairs:
                self.load_weights(pairs)
            return
        if self._mapped is None:
            self._mapped = mb.map_engine(self._receiver.plan, self._model, self.load_weights)
        self._receiver.copy_into(number, self._mapped)

    def finish(self) -> None:
        """End of a round: every weight has come, or this raises."""
        assert self._receiver is not None
        self._receiver.finish()

    @torch.no_grad()
    def generate(
        self, prompts: Tensor, num_tokens: int, seed: int, images: Mapping[str, Tensor] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Sample ``num_tokens`` for each of ``prompts`` ``[batch, prompt]``.

        ``images`` are what a processor makes of those of all prompts. They are shown with the prompts alone, so a token
        that is sampled with the id of an image is one of text.

        Returns:
            ``[batch, prompt + num_tokens]`` of tokens, and fp32 ``[batch, num_tokens]`` of their log-probabilities.
        """
        if self._mapped is not None:
            self._mapped.require_whole()
        generator = torch.Generator(self._device).manual_seed(seed)
        tokens, chosen, cache = [prompts.to(self._device)], [], None
        shown = {name: value.to(self._device) for name, value in (images or {}).items()}
        for _ in range(num_tokens):
            output = self._model(tokens[-1], past_key_values=cache, use_cache=True, **shown)
            cache, shown = output.past_key_values, {}
            logs = output.logits[:, -1].float().log_softmax(-1)
            tokens.append(logs.exp().multinomial(1, generator=generator))
            chosen.append(logs.gather(-1, tokens[-1]))
        return torch.cat(tokens, 1).cpu(), torch.cat(chosen, 1).cpu()

    def close(self) -> None:
        """Let go of the buffers."""
        if self._receiver is not None:
            self._receiver.close()


def serve(pipe: Connection, make_engine: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    """Answer until the pipe ends."""
    with closing(make_engine(*arguments)) as engine:
        while True:
            try:
                method, arguments = pipe.recv()
            except EOFError:
                return
            try:
                pipe.send(getattr(engine, method)(*arguments))
            except Exception as error:
                pipe.send(error)


class RemoteEngine:
    """``make_engine(*arguments)`` in another process: an ``Engine``, or what answers as one."""

    def __init__(self, make_engine: Callable[..., Any], *arguments: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs, make_engine, arguments))
        self._process.start()  # no daemon, which could have no workers
        atexit.register(self.close)
        theirs.close()  # an engine that dies is then seen as the end of the pipe

    def __call__(self, method: str, *arguments: Any) -> Any:
        """Ask, and wait for the answer."""
        self.pipe.send((method, arguments))
        return self.answer()

    def answer(self) -> Any:
        """The next answer; raises what the engine raised."""
        answer = self.pipe.recv()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def sync(self, ring: mb.BufferRing, pairs: Any) -> None:
        """Hand all weights on, in the slots of ``ring``."""
        for bucket in ring.fill(pairs, acknowledged=self.answer):
            self.pipe.send(("load", (bucket.number,)))
        self("finish")

    def close(self) -> None:
        """End the process."""
        self.pipe.close()
        self._process.join(30)
        self._process.terminate()
