"""Planted mistakes in the submodules of a layer that add residuals, or that norm the input of the MLP."""

from typing import Any

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from torch import nn

from mcore_bridge.factory import chunk
from mcore_bridge.factory.modules import multipliers as residuals
from mcore_bridge.factory.modules import multipliers as scales
from mcore_bridge.factory.modules import norms, torch_modules
from mcore_bridge.factory.modules import parallel_blocks as parallel
from tests.support.bounds import ONE
from tests.support.mutants import instead, nothing


def of_what_it_is_given(self: parallel.SharedInput, norm: type) -> type:
    """The second norm reads the residual after attention."""
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


def around_nothing(self: Any, hidden: Any) -> Any:
    """A LayerNorm that subtracts no mean."""
    return torch_modules.Norm.scaled(self, hidden, hidden.float().square().mean(-1, keepdim=True), self.weight)


def unnormed(module: Any, inputs: object, outputs: Any) -> Any:
    return outputs


MODULES = {
    "residuals without their multiplier": ("granite", ONE, instead(residuals, "multiplied", plain)),
    "mixers without the multiplier": ("granitemoehybrid-no-experts", ONE, instead(residuals, "multiplied", plain)),
    "bias without the multiplier": ("granite", ONE, instead(residuals, "multiplied", bias_behind)),
    "logits not divided": ("granite", ONE, instead(scales, "scale_logits", nothing)),
    "experts summed, not averaged": ("cohere2_moe", ONE, instead(residuals, "multiplied", plain)),
    "second norm forgotten": ("cohere2", ONE, instead(parallel.SharedInput, "recalled", given_on)),
    "second norm of the sum": ("gpt_neox", ONE, instead(parallel.SharedInput, "recalling", of_what_it_is_given)),
    "mean not subtracted": ("cohere", ONE, instead(torch_modules.Norm, "forward", around_nothing)),
    "no norm behind the experts": ("axk1", ONE, instead(norms, "_norm_output", unnormed)),
    "bias of the head not added": ("phi", ONE, instead(chunk, "hide_padding", without_bias)),
}
