"""Names and values of the release before work in this one, and warn the code that has them."""

import inspect
from typing import Any

import pytest
import torch

import mcore_bridge as mb
from mcore_bridge import engines
from mcore_bridge.arguments import FORMER_ARGUMENTS, FORMER_VALUES
from mcore_bridge.convert.convert import convert
from mcore_bridge.factory.blueprint import BuildOptions
from mcore_bridge.models.qwen3 import ARCHITECTURE
from mcore_bridge.weights.load_state import LoadReport
from mcore_bridge.weights.not_built import Mtp
from tests.support import fake_mesh
from tests.support.strategies import random_state, tiny

MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "num_key_value_heads": 2}
HF = tiny("qwen3_moe", vocab_size=97, num_hidden_layers=1, **MOE)


def test_each_function_and_class_with_such_an_argument_accepts_former_names() -> None:
    named = {f"{home.__name__}.{name}": getattr(home, name) for home in (mb, engines) for name in home.__all__}
    named |= {"convert": convert, "BuildOptions": BuildOptions}
    own = {*FORMER_ARGUMENTS.values(), *FORMER_VALUES}
    for name, value in named.items():
        called = vars(value).get("__init__") if isinstance(value, type) else value
        if name == "mcore_bridge.build_model" or not callable(called):  # its arguments become BuildOptions
            continue
        if own & inspect.signature(called).parameters.keys():
            assert hasattr(called, "__wrapped__"), f"decorate {name} with accepts_former_names"
    assert hasattr(mb.save_hf_checkpoint, "__wrapped__")
    assert "dialect" not in inspect.signature(mb.save_hf_checkpoint).parameters


def test_former_names_mean_the_same_and_warn(tmp_path: Any) -> None:
    state = random_state(HF)

    def warned(former: str) -> Any:
        return pytest.warns(DeprecationWarning, match=f"^{former} is now ")

    with fake_mesh.rank_of(mb.ParallelDims(), 0, 1):
        with warned("vision='carried'") as seen:
            models = mb.build_model(HF, dims=mb.ParallelDims(), device="cpu", load_weights=False, vision="carried")
        assert models[0].bridge.vision == "text_only"
        with warned("dialect="):
            report = mb.load_hf_weights(models, iter(state.items()), dialect="split", dtype=torch.bfloat16)  # type: ignore[call-arg]
        with warned("dialect="):
            fused = mb.to_hf_state_dict(models, dialect="fused")  # type: ignore[call-arg]
        with warned("mcore_bridge.iter_hf_pieces"):
            names = {shard.name for shard in mb.iter_hf_pieces(models, expert_format="fused")}
        assert names == fused.keys() == mb.to_hf_state_dict(models, expert_format="fused").keys() != state.keys()
        with warned("mtp='carried'"):
            mb.save_hf_checkpoint(models, tmp_path, mtp="carried")  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="takes expert_format= or its former name dialect=, found both"):
            mb.manifest(models, dialect="split", expert_format="split")  # type: ignore[call-arg]
    assert report.num_tensors == len(state)
    with warned("LoadReport.carried"):
        assert LoadReport(1, 1, not_built=("a",)).carried == ("a",)
    with warned("Architecture.dialect"):
        assert ARCHITECTURE.dialect == "split"
    assert {each.filename for each in seen if "is now" in str(each.message)} == {__file__}
    assert "carried" not in str(Mtp)
