"""Mistakes planted on purpose in the submodules of a layer that add residuals and norm what the MLP reads."""

from typing import Any
from unittest import mock

import pytest
import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from torch import nn

import mcore_bridge as mb
from mcore_bridge.errors import ConfigError
from mcore_bridge.factory import chunk
from mcore_bridge.factory.modules import multipliers, norms, torch_modules
from mcore_bridge.factory.modules import parallel_blocks as parallel
from mcore_bridge.factory.modules.output_layers import output_weight
from mcore_bridge.trainers.verl.replacements import linear_cross_entropy
from tests import zoo
from tests.support import pool
from tests.support.bounds import BOUND, ONE
from tests.support.parity import reference_of, worst_differences
from tests.support.stepping import leave_mesh


def of_what_it_is_given(self: parallel.SharedInput, norm: type) -> type:
    """The second norm, of the residual with what attention has added."""
    return norm


def given_on(self: parallel.SharedInput) -> type:
    """No second norm: the MLP reads the residual itself."""

    class Identity(nn.Identity):
        def __init__(self, **arguments: Any) -> None:
            super().__init__()

    return Identity


def bias_behind(multiplier: float) -> Any:
    """A residual that is multiplied before its bias is added."""

    def get_add(training: bool, fused: bool) -> Any:
        def add(output_with_bias: Any, residual: Any, probability: float) -> Any:
            output, bias = output_with_bias
            return residual + output * multiplier + (0 if bias is None else bias)

        return add

    return get_add


def plain(multiplier: float) -> Any:
    """megatron-core's own sum."""
    return get_bias_dropout_add


def without_bias(model: Any, vocab_size: int) -> None:
    model.output_layer.skip_bias_add = True


def nothing(chunk: Any) -> None:
    """A step that is left out."""


def around_nothing(self: Any, hidden: Any) -> Any:
    """A LayerNorm that subtracts no mean."""
    return torch_modules.Norm.scaled(self, hidden, hidden.float().square().mean(-1, keepdim=True), self.weight)


def unnormed(module: Any, inputs: object, outputs: Any) -> Any:
    return outputs


MUTANTS: dict[str, tuple[str, Any, str, Any]] = {
    # mistake: the case that shows it, and what is put in place of which attribute
    "residuals without their multiplier": ("granite", multipliers, "multiplied", plain),
    "mixers without the multiplier": ("granitemoehybrid-no-experts", multipliers, "multiplied", plain),
    "bias without the multiplier": ("granite", multipliers, "multiplied", bias_behind),
    "logits not divided": ("granite", multipliers, "scale_logits", nothing),
    "experts summed, not averaged": ("cohere2_moe", multipliers, "multiplied", plain),
    "second norm forgotten": ("cohere2", parallel.SharedInput, "recalled", given_on),
    "second norm of the sum": ("gpt_neox", parallel.SharedInput, "recalling", of_what_it_is_given),
    "mean not subtracted": ("cohere", torch_modules.Norm, "forward", around_nothing),
    "no norm behind the experts": ("axk1", norms, "_norm_output", unnormed),
    "bias of the head not added": ("phi", chunk, "hide_padding", without_bias),
}


def differences(jobs: list[tuple[str, Any]]) -> list[float]:
    """Runs in a worker: how far each mutant moves the logits."""
    found = []
    for name, reference in jobs:
        case, owner, attribute, wrong = MUTANTS[name]
        with mock.patch.object(owner, attribute, wrong):
            found += worst_differences([(zoo.cases()[case].hf, ONE, reference)])
    return found


def test_killed_by_logits() -> None:
    names = [name for name, mutant in MUTANTS.items() if zoo.here([mutant[0]])]
    assert len(names) >= 7  # transformers 4.57 lacks two of the families
    (worst,) = pool.run(1, differences, [(name, reference_of(MUTANTS[name][0])) for name in names])
    survivors = {name for name, difference in zip(names, worst, strict=True) if difference < 50 * BOUND}
    assert survivors == set()


def said_to_verl() -> list[str]:
    """Runs in a worker: why verl's fused kernels are kept from models whose logits their weight does not give."""
    said = []
    for name in ("granite", "cohere", "phi"):
        ONE.initialize(device="cpu")
        (model,) = mb.build_model(zoo.cases()[name].hf, dims=ONE, dtype=torch.float32, device="cpu", load_weights=False)
        with pytest.raises(ConfigError, match="Set use_fused_kernels=False") as caught:
            linear_cross_entropy(torch.empty(2, 8), output_weight(model), torch.zeros(2).long())
        said.append(str(caught.value))
        leave_mesh()
    return said


def test_verls_kernels_are_told_of_what_happens_to_logits() -> None:
    ((of_granite, of_cohere, of_phi),) = pool.run(1, said_to_verl)
    assert "scales them (factor and divisor: (None, 3.0))" in of_granite
    assert "scales them (factor and divisor: (0.3, None))" in of_cohere
    assert "adds a bias to them" in of_phi
