"""Batches for ``forward``, and the results of transformers for them."""

import torch

from tests import zoo
from tests.support.parity import BATCH, LONG, tokens

LENGTHS = (LONG - 3, LONG)


def batch_of(hf):
    """Tokens and mask. The first row is shorter than the second, has an odd length, and is padded on the left."""
    ids, mask = tokens(hf, LONG), torch.zeros(BATCH, LONG, dtype=torch.long)
    padded = torch.zeros_like(ids)
    for row, length in enumerate(LENGTHS):
        padded[row, LONG - length :] = ids[row, :length]
        mask[row, LONG - length :] = 1
    return padded, mask


def expected_of(logits, hf, temperature=1.0):
    """Log-probs and entropies of transformers' logits for whole rows. Attention is causal, so a prefix has equal
    values.
    """
    log_probs, entropies = torch.zeros(BATCH, LONG), torch.zeros(BATCH, LONG)
    logs = torch.log_softmax(logits.float() / temperature, -1)
    ids = tokens(hf, LONG)
    for row, length in enumerate(LENGTHS):
        at = slice(LONG - length + 1, LONG)
        log_probs[row, at] = logs[row, : length - 1].gather(-1, ids[row, 1:length, None])[:, 0]
        entropies[row, at] = -(logs.exp() * logs).sum(-1)[row, : length - 1]
    return log_probs, entropies


FAMILIES = {case.model_type: name for name, case in reversed(zoo.cases().items())}
"""The first case of each."""
