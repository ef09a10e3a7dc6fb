"""Pieces of ranks, put together."""

import torch


def merged(pieces):
    """The HF tensors that the pieces of all ranks make up, by name, in fp32; NaN where no piece has a value."""
    found = {}
    for piece in pieces:
        assert piece.tensor.untyped_storage().nbytes() > 0
        whole = found.setdefault(piece.name, torch.full(piece.shape, float("nan")))
        there = whole[piece.index]
        assert there.shape == piece.tensor.shape, piece.name
        assert (there.isnan() | (there == piece.tensor)).all(), f"ranks disagree on {piece.name}"
        whole[piece.index] = piece.tensor
    return found
