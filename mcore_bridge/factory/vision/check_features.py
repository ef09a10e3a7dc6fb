"""Checks that images fit their image tokens, row by row.

transformers compares only the sums over all rows. One row may be cut inside an image, while another has one image token
too many. Then the features of all rows between them would be at wrong places.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from mcore_bridge.errors import BatchError, BridgeError

_FEATURES = ("get_image_features", "get_video_features")
_KINDS = ("images", "videos")
_ADVICE = (
    "Do not cut rows inside an image, and give each row its own images. If the model has sampled a token with the id "
    "of an image, pass mm_token_type_ids with 0 for this token"
)
_OF_TRANSFORMERS = re.compile(
    r"features.*tokens.*do not match|placeholder span|shape mismatch: value tensor", re.DOTALL
)
"""Texts of errors: of transformers if tokens do not match features, of torch if a row is too short for its positions.
"""


class MisfitError(Exception):
    """Images do not fit a sequence. The first argument is the number of the sequence, the second the fault."""


@contextlib.contextmanager
def fitting(composite: nn.Module, types: Tensor, counts: Sequence[tuple[int, int]] | None) -> Iterator[None]:
    """In the block, features that do not fit the tokens of a row raise ``MisfitError`` before they replace tokens.

    Args:
        composite: transformers' model, which computes features of images and videos in separate methods.
        types: the types of all tokens, ``[batch, seq]``.
        counts: the numbers of images and videos of each row; further rows have none. None: unknown.
    """
    running: list[str] = []

    def checked(name: str, compute: Any) -> Any:
        def features(*args: Any, **kwargs: Any) -> Any:
            running.append(name)
            try:
                output = compute(*args, **kwargs)
            finally:
                running.pop()
            if not running:  # the method for videos may call the method for images
                kind = _FEATURES.index(name)
                own = None if counts is None else [of_row[kind] for of_row in counts]
                _require_fit(features_in(output), (types == kind + 1).sum(1).tolist(), own, _KINDS[kind])
            return output

        return features

    names = [name for name in _FEATURES if hasattr(composite, name)]
    for name in names:
        vars(composite)[name] = checked(name, getattr(composite, name))
    try:
        yield
    finally:
        for name in names:
            del vars(composite)[name]


def features_in(output: Any) -> Any:
    """The features of images, or of videos, in the result of ``get_image_features``.

    Llama 4 returns the output of its tower, before the layer that connects it to the text.
    """
    return output.last_hidden_state if output.pooler_output is None else output.pooler_output


def _require_fit(features: Any, tokens: Sequence[int], counts: Sequence[int] | None, kind: str) -> None:
    """Raise ``MisfitError`` unless the tokens of each row match its images, or at least whole images."""
    num_images = 2 if counts is None else sum(counts)
    if isinstance(features, Tensor) and (features.dim() == 2 or len(features) == 1 < num_images):
        return  # for all images together: transformers compares the sums
    left = [len(feature) for feature in features]
    if len(left) != num_images:  # Video-LLaVA has features of each frame
        counts = None
    for row, wanted in enumerate(tokens):
        taken: list[int] = []
        while left and (sum(taken) < wanted if counts is None else len(taken) < sum(counts[row : row + 1])):
            taken.append(left.pop(0))
        if sum(taken) != wanted:
            raise MisfitError(row, f"{wanted} tokens for {kind} that have {taken} features")
    if left:
        raise MisfitError(len(tokens) - 1, f"no tokens for {kind} that have {left} features")


def misfit(error: Exception, rows: Sequence[int] | None) -> BatchError:
    """The error for a caller, which names the row. It gives advice only if the inputs of images are wrong.

    Args:
        error: the error that was raised.
        rows: the caller's numbers of the rows. None: they are counted from 0.
    """
    if isinstance(error, MisfitError):
        number, reason = error.args
        row = number if rows is None else rows[min(number, len(rows) - 1)]
        return BatchError(
            f"each row must have one token for each feature of its images, found in row {row}: {reason}. {_ADVICE}"
        )
    if isinstance(error, BridgeError):
        return BatchError(str(error))
    where = "a row" if rows is None else f"one of the rows {[*rows]}"
    reason = f"{type(error).__name__}: {error}"
    problem = BatchError(f"transformers must take the inputs of images, found in {where}: {reason}{_advice(error)}")
    problem.__cause__ = error
    return problem


def _advice(error: Exception) -> str:
    # transformers' positions of a row end early if it has more images than grids
    if isinstance(error, StopIteration) or _OF_TRANSFORMERS.search(str(error)):
        return f". {_ADVICE}"
    return ". Pass everything that the processor of this model returns" if "NoneType" in str(error) else ""
