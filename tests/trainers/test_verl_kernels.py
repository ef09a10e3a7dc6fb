"""verl's fused kernels are not used for models whose logits are more than hidden states times a weight."""

import pytest
import torch

import mcore_bridge as mb
from mcore_bridge.errors import ConfigError
from mcore_bridge.factory.modules.output_layers import output_weight
from mcore_bridge.trainers.verl.replacements import linear_cross_entropy
from tests import zoo
from tests.support import pool
from tests.support.bounds import ONE
from tests.support.stepping import leave_mesh


def said_to_verl() -> list[str]:
    """Runs in a worker: the reasons with which models refuse verl's fused kernels, since logits need more than a
    weight.
    """
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
