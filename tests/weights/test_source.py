"""A source has one table from plain names to stored tensors, for every kind of source."""

import torch

from mcore_bridge.weights.provenance import provenance_of
from mcore_bridge.weights.source.source import Source, open_source
from tests.support.strategies import random_state, save, tiny

HF = tiny("llama", vocab_size=97, num_hidden_layers=2)
STATE = {name: tensor for name, tensor in random_state(HF).items() if name.startswith("model.")}
HEADLESS = {name.removeprefix("model."): tensor for name, tensor in STATE.items()}
MAPPING = provenance_of(HF).mapping(tied=False)


def test_what_a_model_sees_of_a_source_leaves_it_as_it_is(tmp_path):
    save(HEADLESS, HF, tmp_path)
    for source in (open_source(tmp_path), open_source(HEADLESS)):
        view = source.for_model(MAPPING)
        assert source.keys() == HEADLESS.keys()
        assert view.keys() == view.for_model(MAPPING).keys() == STATE.keys()
        assert all(view.stored(f"model.{name}").names == (name,) for name in HEADLESS)
        assert all(torch.equal(view[name], tensor) for name, tensor in STATE.items())
        assert open_source(view) is view
    assert dict(open_source(iter(HEADLESS.items())).for_model(MAPPING)).keys() == STATE.keys()


def test_a_tensor_with_the_prefix_is_not_replaced_by_one_without():
    name = "model.norm.weight"
    view = Source({**HEADLESS, name: -STATE[name]}).for_model(MAPPING)
    assert view.keys() == {*STATE, "norm.weight"}
    assert torch.equal(view[name], -STATE[name])
