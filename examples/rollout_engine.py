"""An engine of its own: transformers' model, to which a trainer's ``WeightSync`` brings weights. No megatron-core."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import transformers
from torch import Tensor

from mcore_bridge.engines import EngineWorker


class Engine:
    """Samples from a model whose weights somebody else owns. While it sleeps, it has no memory for them."""

    def __init__(self, config: Mapping[str, Any], dtype: torch.dtype, device: str) -> None:
        hf = transformers.AutoConfig.for_model(**config)
        kind = "AutoModelForImageTextToText" if hasattr(hf, "vision_config") else "AutoModelForCausalLM"
        self.model = getattr(transformers, kind).from_config(hf, dtype=dtype).to(device).eval()
        self.weights, self.device = dict(self.model.named_parameters(remove_duplicate=False)), device
        self.shapes = {name: weight.shape for name, weight in self.weights.items()}
        name = f"transformers {transformers.__version__}, {hf.model_type}, worker 0 of 1"
        self.receive = EngineWorker(self.model, self.load_weights, name=name).receive
        self.sleep()

    @torch.no_grad()
    def load_weights(self, pairs: Iterable[tuple[str, Tensor]]) -> None:
        """Take weights by their HF names, which transformers' model has as well."""
        for name, tensor in pairs:
            self.weights[name].copy_(tensor)

    def sleep(self) -> None:
        """Give all memory of the weights back; what they were is lost."""
        for weight in self.weights.values():
            weight.data = weight.data.new_empty(0)

    def wake(self) -> None:
        """Take memory for weights, with nothing in it that anybody could mistake for them."""
        for name, weight in self.weights.items():
            weight.data = torch.full(self.shapes[name], torch.nan, dtype=weight.dtype, device=self.device)
        self.model.tie_weights()

    @torch.no_grad()
    def generate(
        self, prompts: Tensor, num_tokens: int, seed: int, images: Mapping[str, Tensor] | None = None
    ) -> tuple[Tensor, Tensor]:
        """All tokens ``[batch, prompt + num_tokens]``, and log-probs of the new ones; ``images`` are in the prompts."""
        generator = torch.Generator(self.device).manual_seed(seed)
        shown = {name: value.to(self.device) for name, value in (images or {}).items()}
        tokens, logs, cache = [prompts.to(self.device)], [], None
        for _ in range(num_tokens):
            output = self.model(tokens[-1], past_key_values=cache, use_cache=True, **shown)
            cache, shown, all_logs = output.past_key_values, {}, output.logits[:, -1].float().log_softmax(-1)
            tokens.append(all_logs.exp().multinomial(1, generator=generator))
            logs.append(all_logs.gather(-1, tokens[-1]))
        return torch.cat(tokens, 1).cpu(), torch.cat(logs, 1).cpu()
