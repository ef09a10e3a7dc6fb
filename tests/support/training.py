"""Steps of training, held against transformers."""

from functools import cache
from typing import Any

from mcore_bridge import ParallelDims
from tests.support import stepping, tiny

LR = 0.3


CASES = {
    "llama": tiny.config("llama", attention_bias=True, mlp_bias=True),
    "llama, o_proj bias, square": tiny.config("llama", **tiny.SQUARE),
    "mistral": tiny.config("mistral"),
    "qwen2, tied": tiny.config("qwen2"),
    "qwen3": tiny.config("qwen3"),
}


@cache
def expected(name: str) -> Any:
    """transformers' loss, gradients and weights after a step of SGD."""
    model = tiny.random_model(CASES[name])
    _, loss, grads = tiny.reference(model, tiny.tokens(16))
    return loss, grads, {n: p.detach() - LR * grads[n] for n, p in model.named_parameters()}


def steps(folders: dict[str, str], meshes: list[dict[str, Any]], every: int = 1) -> list[Any]:
    """Runs in each worker: a step on each mesh, of each checkpoint or of ``every`` so many in turn."""
    found = []
    for turn, sizes in enumerate(meshes):
        dims = ParallelDims(**sizes)
        with stepping.mesh(dims):
            for name, folder in list(folders.items())[turn % every :: every]:
                step = stepping.train(folder, dims, tiny.tokens(16), lr=LR, micro_batch_size=4)
                found.append((f"{name} on {sizes}", name, step))
    return found


def assert_equal_to_transformers(ranks: list[list[Any]]) -> None:
    for results in zip(*ranks, strict=True):
        tiny.assert_losses(results, expected(results[0][1])[0])
        for label, name, step in results:
            _, grads, weights = expected(name)
            assert step["grads"].keys() == grads.keys(), label
            for which, truth in (("grads", grads), ("weights", weights)):
                tiny.assert_near(step[which], truth, f"{label}: {which}")
