"""Tiny HF models in which no value is zero, one or equal by chance, and the results of transformers with them.

Dims are pairwise distinct, so that a transposed or misplaced matrix cannot fit. In ``SQUARE`` all dims are equal, so
that only the rules can tell matrices apart. There are four key-value heads and eight queries: tp=8 splits within a
group.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from tests.support.bounds import ROUNDING
from tests.support.text_halves import published_names, random_experts

DISTINCT = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 14,
}
SQUARE = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 8}
COMMON = {"vocab_size": 90, "num_hidden_layers": 4, "max_position_embeddings": 32, "rms_norm_eps": 1e-5}
OWN: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True},
    "mistral": {"sliding_window": 5},
    "qwen2": {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 2, "tie_word_embeddings": True},
    "qwen3": {"attention_bias": False},
}
SEQ_LEN = 16


def config(model_type: str, **changes: Any) -> PretrainedConfig:
    """A tiny config of one of the four families; ``changes`` are HF fields."""
    return AutoConfig.for_model(model_type, **{**DISTINCT, **COMMON, **OWN[model_type], **changes})


def random_model(hf: PretrainedConfig, *, seed: int = 0, model_class: Any = AutoModelForCausalLM) -> Any:
    """transformers' fp32 model with norms around one, and everything else, biases too, around zero."""
    generator = torch.Generator().manual_seed(seed)
    build = model_class.from_config if hasattr(model_class, "from_config") else model_class._from_config
    model = build(hf, dtype=torch.float32).float().eval()  # transformers 4 leaves numbers of an activation in bf16
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.15 + ("norm" in name))
        for name, scale in model.named_buffers():
            if name.endswith(("layer_scalar", "act_fn.beta", "act_fn.eps")):
                scale.copy_(torch.randn(scale.shape, generator=generator) * 0.15 + name.endswith("scalar"))
            elif name.endswith("tid2eid"):
                scale.copy_(random_experts(hf, generator))
    return model


def random_checkpoint(
    hf: PretrainedConfig,
    folder: Path,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    model_class: Any = AutoModelForCausalLM,
) -> Path:
    """``random_model`` in ``dtype``, saved by transformers in several shards."""
    model = random_model(hf, seed=seed, model_class=model_class).to(dtype)
    model.save_pretrained(folder, max_shard_size=sum(p.nbytes for p in model.parameters()) // 3)
    if hf.model_type == "olmo_hybrid":  # transformers writes parts that nothing else can read
        files = [*folder.glob("*.safetensors")]
        state = {name: tensor for file in files for name, tensor in load_file(file).items()}
        for file in [*files, *folder.glob("*.index.json")]:
            file.unlink()
        state = {name: tensor.clone() for name, tensor in published_names(hf, state).items()}
        save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def tokens(
    num_sequences: int, *, seq_len: int = SEQ_LEN, vocab_size: int = COMMON["vocab_size"], seed: int = 1
) -> Tensor:
    """Random tokens ``[num_sequences, seq_len + 1]``: labels are the inputs shifted by one."""
    return torch.randint(0, vocab_size, (num_sequences, seq_len + 1), generator=torch.Generator().manual_seed(seed))


def reference(model: Any, batch: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Logits, mean loss and gradients of every parameter that has one, by HF name, of a causal LM on ``tokens``."""
    model.zero_grad(set_to_none=True)
    logits = model(batch[:, :-1]).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())
    loss.backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return logits.detach(), loss.detach(), grads


_NUMBER = re.compile(r"\d+")


def relative_error(found: Tensor, expected: Tensor) -> float:
    """The largest difference, as a part of the largest expected value."""
    return float((found.float() - expected.float()).abs().max() / expected.float().abs().max().clamp_min(1e-12))


def assert_equal_rules(
    inputs: Sequence[Tensor], weight: Tensor, rule: Callable[..., Tensor], expected: Callable[..., Tensor]
) -> None:
    """Assert that a rule in fp32 has the answer and the gradients of another one in fp64, up to rounding errors.

    Args:
        weight: by what each element of the answer is multiplied in the loss.
    """
    results = []
    for each, dtype in ((rule, torch.float32), (expected, torch.float64)):
        leaves = [part.detach().to(dtype, copy=True).requires_grad_() for part in inputs]
        answer = each(*leaves)
        (answer * weight.to(dtype)).sum().backward()
        results.append([answer.detach(), *(leaf.grad for leaf in leaves)])
    for own, other in zip(*results, strict=True):
        assert relative_error(own, other) < 1e-5


def assert_near(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], label: str) -> None:
    """Assert that all expected tensors are there, and equal up to rounding errors of fp32 in another order.

    A number alone may be a sum that is nearly zero. So its error counts beside the largest of its kind in all layers.
    """
    errors = {name: relative_error(found[name], expected[name]) for name in expected}
    alone = {name: tensor for name, tensor in expected.items() if tensor.numel() == 1}
    for name, tensor in alone.items():
        kind = _NUMBER.sub("*", name)
        most = max(float(own.abs()) for other, own in alone.items() if _NUMBER.sub("*", other) == kind)
        errors[name] = float((found[name] - tensor).abs()) / max(most, 1e-12)
    off = {name: error for name, error in errors.items() if not error < 5e-5 * ROUNDING}  # also raises for NaN
    assert not off, f"{label}: {off}"


def assert_losses(ranks: Sequence[tuple[str, str, Any]], loss: Tensor) -> None:
    """The loss of a step, from the ranks that have one. Each rank has a label, a name and the step."""
    found = [step["loss"] for _, _, step in ranks if step["loss"] is not None]
    assert found, ranks[0][0]
    assert max(relative_error(each, loss) for each in found) < 1e-5, ranks[0][0]
