"""Pieces of ranks, put together."""

import torch


def merged(pieces):
    """Join the pieces of all ranks to HF tensors, by name, in fp32. Elements that no piece has are NaN."""
    found = {}
    for piece in pieces:
        assert piece.tensor.untyped_storage().nbytes() > 0
        whole = found.setdefault(piece.name, torch.full(piece.shape, float("nan")))
        there = whole[piece.index]
        assert there.shape == piece.tensor.shape, piece.name
        assert (there.isnan() | (there == piece.tensor)).all(), f"ranks disagree on {piece.name}"
        whole[piece.index] = piece.tensor
    return found
