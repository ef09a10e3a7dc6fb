"""Core attention with scores in memory, of some queries at a time."""

from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from megatron.core.transformer.enums import AttnMaskType

from mcore_bridge.factory.modules import scores
from mcore_bridge.factory.modules.scores import RelativeCoreAttention, ScoresCoreAttention

HEADS, GROUPS, DIM, PROFILES = 4, 2, 8, 3
CONFIG = SimpleNamespace(
    attention_dropout=0.0,
    attention_softcap=5.0,
    init_method=torch.nn.init.normal_,
    kv_channels=DIM,
    num_attention_heads=HEADS,
    params_dtype=torch.float32,
    perform_initialization=True,
    relative_extent=5,
    relative_profiles=PROFILES,
    sequence_parallel=False,
    softmax_type="learnable",
    tensor_model_parallel_size=1,
    use_cpu_initialization=True,
    window_attn_skip_freq=None,
    window_size=None,
)
ALONE = SimpleNamespace(cp=SimpleNamespace(size=lambda: 1))


def core(kind, **fields):
    torch.manual_seed(0)
    config = SimpleNamespace(**{**vars(CONFIG), **fields})
    return kind(config, 1, AttnMaskType.causal, "self", pg_collection=ALONE).train()


def attended(module, length, at_once, mask=None):
    """Outputs and gradients, if so many scores are in memory at once."""
    generator = torch.Generator().manual_seed(1)
    own = DIM + PROFILES * isinstance(module, RelativeCoreAttention)
    sizes = (length, 2, HEADS, own), (length, 2, GROUPS, DIM), (length, 2, GROUPS, DIM)
    inputs = [torch.randn(size, generator=generator).requires_grad_() for size in sizes]
    module.zero_grad()
    torch.manual_seed(2)
    with mock.patch.object(scores, "_AT_ONCE", at_once):
        output = module(*inputs, mask)
    (output * torch.randn(output.shape, generator=generator)).sum().backward()
    return [output.detach(), *(tensor.grad for tensor in (*inputs, *module.parameters()))]


@pytest.mark.parametrize("fields", [{}, {"window_size": (3, 0)}], ids=["whole", "window"])
@pytest.mark.parametrize("kind", [ScoresCoreAttention, RelativeCoreAttention])
def test_pieces_of_queries_have_the_outputs_and_gradients_of_all_at_once(kind, fields, monkeypatch):
    monkeypatch.setattr(scores, "copy_to_tensor_model_parallel_region", lambda tensor: tensor)
    module, length = core(kind, **fields), 13
    padded = torch.ones(2, length, dtype=torch.int64)
    padded[1, :4] = 0
    for mask in (None, padded, torch.zeros(2, 1, 1, length, dtype=torch.bool)):
        whole = attended(module, length, 1 << 20, mask)
        for at_once in (1, 4 * 2 * HEADS * length):
            pieces = attended(module, length, at_once, mask)
            for one, other in zip(whole, pieces, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_the_backward_drops_what_the_forward_has_dropped():
    """With values that are unit vectors, the output is the weights, and the gradients of values are their sums."""
    module = core(ScoresCoreAttention, attention_dropout=0.5)
    query, key = (torch.randn(DIM, 1, heads, DIM) for heads in (HEADS, HEADS))
    value = torch.eye(DIM).repeat(1, HEADS).view(DIM, 1, HEADS, DIM).requires_grad_()
    with mock.patch.object(scores, "_AT_ONCE", 2 * HEADS * DIM), mock.patch.object(module, "sequence_parallel", True):
        weights = module(query, key, value).view(DIM, HEADS, DIM)
    upstream = torch.randn(weights.shape)
    (weights * upstream).sum().backward()
    expected = torch.einsum("snt,snd->tnd", weights.detach(), upstream)
    torch.testing.assert_close(value.grad[:, 0], expected)
    assert 0.2 < (weights == 0).float().mean() < 0.9
