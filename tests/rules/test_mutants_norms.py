"""Planted mistakes in families with other places of norms, capped scores, and a different rope in each layer."""

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch

import mcore_bridge as mb
from mcore_bridge.config.rope import Rope
from mcore_bridge.config.tables.alpha_rope import AlphaRope
from mcore_bridge.factory.modules import layer_rope, norms, scores
from mcore_bridge.factory.modules import scale_hooks as scales
from tests import zoo
from tests.support import pool, stepping, tiny
from tests.support.bounds import BOUND
from tests.support.mutants import MUTANTS as OF_RULES
from tests.support.mutants import exchange, mutated
from tests.support.norm_cases import CASES
from tests.support.parity import reference_of, worst_differences


class Mutant(NamedTuple):
    """A case of the zoo (or, where gradients kill it, of ``test_training_norms``), the mesh, and the mistake."""

    case: str
    dims: mb.ParallelDims
    plant: Callable[[], AbstractContextManager[Any]]


def instead(owner: Any, name: str, wrong: Any) -> Callable[[], AbstractContextManager[Any]]:
    return lambda: mock.patch.object(owner, name, wrong)


def exchanged(one: str, other: str) -> Callable[[], AbstractContextManager[Any]]:
    """The rules of two parameters exchanged."""

    def plant() -> AbstractContextManager[Any]:
        stack = ExitStack()
        stack.enter_context(mock.patch.dict(OF_RULES, {"exchanged": ("logits", exchange(one, other))}))
        stack.enter_context(mutated("exchanged"))
        return stack

    return plant


def norm_before_bias(module: Any, inputs: object, outputs: tuple[Any, Any]) -> Any:
    output, bias = outputs
    return module.post_layernorm(output), bias


def heads_of_the_first_rank(self: Any, hidden: torch.Tensor, mean_square: torch.Tensor, weight: torch.Tensor) -> Any:
    weight = self.weight.view(self.num_heads, self.head_dim)[: hidden.size(-2)]
    return norms.Norm.scaled(self, hidden, mean_square, weight)


def shared_heads_counted_again(self: Any, hidden: torch.Tensor, mean_square: torch.Tensor, weight: Any) -> Any:
    times = hidden.size(-2) * torch.distributed.get_world_size() / self.num_heads
    return norms.Norm.scaled(self, hidden, mean_square * times, weight)


def unnormed(self: Any, *tensors: Any, **options: Any) -> Any:
    return super(norms.NormAfterRope, self).forward(*tensors, **options)


def without_alpha(self: AlphaRope, seq_len: int | None) -> Any:
    parameters = {"rope_type": "default", "rope_theta": self.theta}
    return Rope(parameters=parameters, head_dim=self.head_dim, max_position_embeddings=64)._computed(None)


def stack_the_other_way(both: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return torch.cat([each[None] for each in reversed(both)])


def itself(tensor: Any, *others: Any) -> Any:
    return tensor


def nothing(*arguments: Any) -> None:
    return None


def unmarked() -> AbstractContextManager[Any]:
    """Post norms that are not marked as computed from a part of the tokens."""
    true = norms.PostNorm.__init__

    def mistaken(self: Any, *sizes: int, **arguments: Any) -> None:
        true(self, *sizes, **arguments)
        self.post_layernorm.weight.sequence_parallel = False

    return mock.patch.object(norms.PostNorm, "__init__", mistaken)


def unsummed() -> AbstractContextManager[Any]:
    """Gradients finalized as if there were no norms of queries and keys."""
    true = stepping.forward_backward

    def mistaken(models: Any, *arguments: Any, **options: Any) -> Any:
        models[0].config.qk_layernorm = models[0].module.config.qk_layernorm = False
        return true(models, *arguments, **options)

    return mock.patch.object(stepping, "forward_backward", mistaken)


ONE, TP, SP = mb.ParallelDims(), mb.ParallelDims(tp=2), mb.ParallelDims(tp=2, sp=True)
FOUR = mb.ParallelDims(tp=4, sp=True)
PROJ, FC2 = "linear_proj.post_layernorm.weight", "linear_fc2.post_layernorm.weight"
LOGITS = {
    "sum over the heads of the rank": Mutant(
        "olmo2", SP, instead(norms, "reduce_from_tensor_model_parallel_region", itself)
    ),
    "weights of the first heads": Mutant("olmo2", SP, instead(norms.AllHeadsNorm, "scaled", heads_of_the_first_rank)),
    "shared key heads counted again": Mutant(
        "olmo2", FOUR, instead(norms.KeyNorm, "scaled", shared_heads_counted_again)
    ),
    "norm before the bias": Mutant("olmo2-bias-tied", ONE, instead(norms, "_norm_output", norm_before_bias)),
    "post norms exchanged": Mutant("olmo2", ONE, exchanged(PROJ, FC2)),
    "pre norm for post norm": Mutant("gemma2", ONE, exchanged(".input_layernorm.weight", PROJ)),
    "scores not capped": Mutant(
        "gemma2", ONE, instead(scores.ScoresCoreAttention, "_attend", scores.CoreAttention._attend)
    ),
    "logits not capped": Mutant("gemma2", ONE, instead(scales, "cap_logits", nothing)),
    "embedding not scaled": Mutant("gemma", ONE, instead(scales, "scale_embedding", nothing)),
    "one rope for all layers": Mutant("gemma3", ONE, instead(layer_rope, "_SLIDING", layer_rope._FULL)),
    "ropes exchanged": Mutant("gemma3-linear", ONE, instead(layer_rope.torch, "stack", stack_the_other_way)),
    "one attention factor": Mutant("olmo3-yarn-bias", ONE, instead(layer_rope, "_with_attention_factor", itself)),
    "no norm behind the rope": Mutant("hunyuan", ONE, instead(norms.NormAfterRope, "forward", unnormed)),
    "alpha forgotten": Mutant("hunyuan", ONE, instead(AlphaRope, "_computed", without_alpha)),
}
GRADIENTS = {
    "sum over heads not on the way back": Mutant(
        "olmo2", TP, instead(norms, "copy_to_tensor_model_parallel_region", itself)
    ),
    "post norm without its mark": Mutant("gemma2", SP, unmarked),
    "norms of all heads not summed": Mutant("olmo2", TP, unsummed),
    "norms behind the rope not summed": Mutant("hunyuan", TP, unsummed),
}


def differences(dims: mb.ParallelDims, jobs: list[tuple[str, Any]]) -> list[float]:
    """Runs in each worker: how far each mutant moves the logits."""
    found = []
    for name, reference in jobs:
        with LOGITS[name].plant():
            found += worst_differences([(zoo.cases()[LOGITS[name].case].hf, dims, reference)])
    return found


@pytest.mark.parametrize("dims", [ONE, SP, FOUR], ids=str)
def test_killed_by_logits(dims: mb.ParallelDims) -> None:
    names = [name for name, mutant in LOGITS.items() if zoo.here([mutant.case])]
    here = [name for name in names if LOGITS[name].dims == dims]
    unseen = [name for name in names if LOGITS[name].dims != ONE == dims]  # why every check runs on several ranks too
    jobs = [(name, reference_of(LOGITS[name].case)) for name in here + unseen]
    for found in pool.run(dims.tp, differences, dims, jobs):
        worst = dict(zip(here + unseen, found, strict=True))
        assert {name for name in here if worst[name] < 50 * BOUND} == set()
        assert {name for name in unseen if worst[name] > BOUND} == set()


def gradients(jobs: list[tuple[str, bool, str, dict[str, torch.Tensor]]]) -> list[float]:
    """Runs in each worker: how far each mutant, or its case without the mistake, moves a gradient."""
    found = []
    for name, planted, folder, expected in jobs:
        dims = GRADIENTS[name].dims
        with stepping.mesh(dims), GRADIENTS[name].plant() if planted else ExitStack():
            grads = stepping.train(folder, dims, tiny.tokens(4))["grads"]
            found.append(max(tiny.relative_error(grads[key], expected[key]) for key in expected))
    return found


def test_killed_by_gradients(tmp_path) -> None:
    jobs = []
    for name, mutant in GRADIENTS.items():
        hf = CASES[mutant.case]
        folder = str(tiny.random_checkpoint(hf, tmp_path / mutant.case))
        expected = tiny.reference(tiny.random_model(hf), tiny.tokens(4))[2]
        jobs += [(name, True, folder, expected), (name, False, folder, expected)]
    for found in pool.run(2, gradients, jobs):
        assert min(found[::2]) > 1e-3, dict(zip(GRADIENTS, found[::2], strict=True))
        assert max(found[1::2]) < 5e-5
