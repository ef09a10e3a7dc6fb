"""Pieces of ranks, put together."""

import torch


def merged(pieces):
    """What the pieces of all ranks make up, by HF name, in fp32; NaN where none has anything."""
    found = {}
    for piece in pieces:
        assert piece.tensor.untyped_storage().nbytes() > 0
        whole = found.setdefault(piece.name, torch.full(piece.shape, float("nan")))
        there = whole[piece.index]
        assert there.shape == piece.tensor.shape, piece.name
        assert (there.isnan() | (there == piece.tensor)).all(), f"ranks disagree on {piece.name}"
        whole[piece.index] = piece.tensor
    return found
