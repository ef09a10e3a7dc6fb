"""Adapters of TransformerEngine's layers, which do not run without a GPU: tests pass in the inputs and outputs of
layers.
"""

from unittest import mock

import pytest
import torch

from mcore_bridge import ParallelDims, build_model
from mcore_bridge.batches.row_sets import TokenSets
from mcore_bridge.errors import ConfigError
from mcore_bridge.factory.adapter_sets import without_adapters
from mcore_bridge.factory.add_adapters import add_adapters
from mcore_bridge.factory.modules import adapter
from mcore_bridge.factory.modules.row_adapters import DispatchedTokens, RowAdapters
from mcore_bridge.rules.names import canonical_names
from mcore_bridge.weights.model_chunks import numbering_of
from mcore_bridge.weights.model_tensors import held_tensors
from tests.support import experts
from tests.support.fake_mesh import rank_of


@pytest.fixture(scope="module")
def chunk():
    """A model with adapters, none of which is zero; the second layer has experts."""
    with rank_of(ParallelDims(), 0, 1):
        (chunk,) = build_model(experts.HF, load_weights=False, dtype=torch.float32)
        add_adapters(chunk, rank=4, alpha=3, targets=["linear_qkv", "linear_fc1"])
        for name, parameter in chunk.named_parameters():
            if ".adapter." in name:
                torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(len(name)))
        yield chunk


class Upper(torch.nn.Module):
    """A dropout that always zeroes the first half of all features."""

    def forward(self, hidden):
        return torch.cat((torch.zeros_like(hidden[..., :24]), hidden[..., 24:] * 2), -1)


def random(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def test_a_norm_in_the_layer_comes_before_the_adapter(chunk):
    layer = chunk.decoder.layers[0].self_attention.linear_qkv
    hidden, normed, bias = random(5, 1, 48), random(5, 1, 48) + 1, random(7)
    product, _ = layer(hidden)
    with without_adapters(chunk):
        base, _ = layer(hidden)
    added = layer.adapter.beside([normed])
    assert torch.equal(product, base + layer.adapter.beside([hidden]))
    for outputs, kept in (((((base, normed), None)), None), ((base, bias, normed), bias)):
        found, same = layer.adapter(layer, (hidden,), outputs)
        assert torch.equal(found, base + added)
        assert same is kept
        with without_adapters(chunk):
            assert layer.adapter(layer, (hidden,), outputs) == (base, kept)


def test_experts_in_one_layer_have_an_adapter_each(chunk):
    mlp, counts = chunk.decoder.layers[1].mlp.experts, (3, 0, 1, 2, 0, 0, 4, 1)
    hidden, grouped = random(sum(counts), 48), mlp.linear_fc1.adapter
    layers = [expert.linear_fc1 for expert in mlp.local_experts]

    def of_layers():
        return torch.cat([layer(own)[0] for layer, own in zip(layers, hidden.split(counts), strict=True)])

    with without_adapters(chunk):
        base = of_layers()
        assert grouped(mlp, (hidden, torch.tensor(counts)), (base, None))[0] is base
    product, bias = grouped(mlp, (hidden, list(counts)), (base, None))
    assert bias is None
    expected = of_layers()
    assert torch.equal(product, expected)
    own = []
    for tokens, *factors in zip(hidden.split(counts), *(factor for _, factor, _ in grouped.tensors), strict=True):
        of_parts = zip(*(factor.chunk(2) for factor in factors), strict=True)  # gate and up
        own.append(torch.cat([tokens @ first.T @ second.T * 3 / 4 for first, second in of_parts], 1))
    torch.testing.assert_close(product, base + torch.cat(own))
    grouped.begin()  # as in a forward of all experts
    assert torch.equal(of_layers(), expected)
    grouped.end()
    grouped.dropout = Upper()
    dropped = of_layers()
    assert torch.equal(grouped(mlp, (hidden, list(counts)), (base, None))[0], dropped)
    assert not torch.equal(expected, dropped)
    grouped.dropout = None
    names = canonical_names("decoder.layers.1.mlp.experts.linear_fc1.adapter.linear_in.weight", numbering_of(chunk))
    assert names == tuple(f"decoder.layers.1.mlp.experts.{n}.linear_fc1.adapter.linear_in.weight" for n in range(8))
    entries = held_tensors([chunk])
    for name, factor in zip(names, grouped.linear_in.weight, strict=True):
        assert torch.equal(entries[name], factor)
        assert entries[name].data_ptr() == factor.data_ptr()


@pytest.mark.skipif(not hasattr(torch.nn.functional, "grouped_mm"), reason="the installed torch has no grouped product")
def test_one_product_for_all_experts_gives_the_bits_of_one_for_each(chunk):
    grouped, counts, found = chunk.decoder.layers[1].mlp.experts.linear_fc1.adapter, [3, 0, 1, 2, 0, 0, 4, 1], []
    hidden = random(sum(counts), 48).requires_grad_()
    for has_kernel, most, calls in ((False, 8, 0), (True, 8, 1), (True, 3, 3), (True, 2, 3)):  # of 2, one has no token
        with (
            mock.patch.object(adapter, "has_grouped_kernel", lambda hidden, has_kernel=has_kernel: has_kernel),
            mock.patch.object(adapter, "_MOST_GROUPS", most),
            mock.patch.object(torch.nn.functional, "grouped_mm", wraps=torch.nn.functional.grouped_mm) as products,
        ):
            product, _ = grouped(None, (hidden, counts), (random(sum(counts), 32), None))
            found.append((product, *torch.autograd.grad(product.square().sum(), [hidden, *grouped.parameters()])))
            assert products.call_count == 2 * calls
            nothing, _ = grouped(None, (hidden[:0], [0] * 8), (product[:0], None))
            assert nothing.shape == (0, 32)
    assert all(all(map(torch.equal, found[0], other)) for other in found[1:])
    assert all(tensor.any() for tensor in found[0][:3])


def sets_of_experts(dropout):
    """Three sets with other ranks and scales, each as one layer of TransformerEngine holds its experts."""
    (chunk,) = build_model(experts.HF, load_weights=False, dtype=torch.float32)
    found = {}
    for number, (rank, alpha) in {0: (4, 3), 1: (3, 5), 3: (8, 1)}.items():
        add_adapters(chunk, rank=rank, alpha=alpha, targets=["linear_fc1"], seed=number, name=str(number))
        found[number] = own = chunk.bridge_adapter_sets.by_name[str(number)].modules[
            "decoder.layers.1.mlp.experts.linear_fc1"
        ]
        own.dropout = dropout
        torch.nn.init.normal_(own.linear_out.weight, std=0.2, generator=torch.Generator().manual_seed(number))
    return found


@pytest.mark.parametrize("dropout", [None, Upper()], ids=["", "dropout"])
@pytest.mark.skipif(not hasattr(torch.nn.functional, "grouped_mm"), reason="the installed torch has no grouped product")
def test_sets_of_experts_in_one_layer_are_one_product_too(chunk, dropout):
    """The set 3 has no tokens, and the set 2 has no adapter in this layer. ``chunk`` brings the process groups."""
    counts, numbers = [3, 0, 1, 2, 0, 0, 4, 1], torch.tensor([1, 0, -1, 2, 0, 1, 1, 0, 0, 2, 1])
    hidden, base, found = random(11, 48).requires_grad_(), random(11, 32), []
    sets = sets_of_experts(dropout)
    expected = base.clone()
    for number, adapters in sets.items():
        expected[numbers == number] = adapters(None, (hidden, counts), (base, None))[0][numbers == number].detach()
    dispatched = DispatchedTokens(None, TokenSets([numbers], ["a", "b", "c", "d"], [], rank=0, parts=1))
    dispatched.take(numbers, counts)
    rows = RowAdapters(sets, dispatched.sort)
    for has_kernel in (False, True):
        with (
            mock.patch.object(adapter, "has_grouped_kernel", lambda hidden, has=has_kernel: has),
            mock.patch.object(torch.nn.functional, "grouped_mm", wraps=torch.nn.functional.grouped_mm) as products,
        ):
            product, _ = rows(None, (hidden, counts), (base, None))
            found.append((product, *torch.autograd.grad(product.square().sum(), [hidden, *rows.parameters()])))
            assert products.call_count == has_kernel * (2 if dropout is None else 5)

    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)
    torch.testing.assert_close(found[0][0].detach(), expected)
    assert not torch.equal(expected, base)
    with pytest.raises(ConfigError, match="must get 11 tokens, as the dispatcher has sent, found 10"):
        dispatched.sort(10, (0, 1), expert=None)
