"""The trainer of docs/guide/embedding.md: after every step it exports the weights that it trains."""

import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mcore_bridge import ParallelDims
from tests.support import pool, stepping
from tests.support.forward_batches import batch_of, expected_of
from tests.support.parity import BATCH, LONG, tokens
from tests.support.strategies import random_state, save, tiny

PAGE = Path(__file__).parent.parent.parent / "docs" / "guide" / "embedding.md"


def train(folder: Path, block: str, dims: ParallelDims) -> list[tuple[Tensor, dict[str, Tensor]]]:
    """For each step, the trainer's embeddings of a batch, and the weights that it exported before."""
    known: dict[str, Any] = {}
    exec(block, known)
    hf = tiny("qwen3")
    ids, mask = batch_of(hf)
    found = []
    with stepping.mesh(dims):
        actor = known["Actor"](folder, dims=dims, dtype=torch.float32, device="cpu")
        parameters = [parameter for chunk in actor.chunks for parameter in chunk.parameters()]
        optimizer = torch.optim.SGD(parameters, lr=0.3)
        for _ in range(3):
            received: dict[str, Tensor] = {}
            actor.sync(received.update)
            said = actor.backward(ids, mask, torch.tensor([1.0, -0.5]))
            found.append((said, {name: tensor.clone() for name, tensor in received.items()}))
            for parameter in parameters:
                parameter.grad = parameter.main_grad  # type: ignore[attr-defined]
            optimizer.step()
    return found


def test_the_trainer_of_the_page_trains_what_it_hands_on(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    hf = tiny("qwen3")
    save(random_state(hf), hf, tmp_path)
    block = next(
        each for each in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL) if "class Actor" in each
    )
    steps = pool.run(4, train, tmp_path, block, ParallelDims(tp=2, pp=2, sp=True))[0]
    engine = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager", dtype=torch.float32).eval()
    seen = []
    for said, state in steps:
        engine.load_state_dict(state)
        logits = engine(tokens(hf, LONG)).logits.detach()
        expected = expected_of(logits, hf)[0]
        assert said.shape == (BATCH, LONG)
        assert float((said - expected).abs().max()) < 1e-4
        seen.append(expected)
    assert float((seen[0] - seen[-1]).abs().max()) > 1e-2, "training changed nothing"
