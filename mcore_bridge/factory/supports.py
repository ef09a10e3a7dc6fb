"""Whether a config can be built: the checks of ``build_model`` that need no weights, before any weight is read."""

from __future__ import annotations

import torch

from mcore_bridge.factory.blueprint import Blueprint, BuildOptions, make_blueprint
from mcore_bridge.weights.provenance import HF, provenance_of


def require_supported(hf: HF) -> Blueprint:
    """Raise unless ``build_model`` builds this config on one rank. Commands call it before they read weights.

    Args:
        hf: a folder, a hub name in the local cache, or a ``PretrainedConfig``.

    Raises:
        ConfigError: there is no config, or it is one that cannot be built.
    """
    provenance = provenance_of(hf, head=None)
    return make_blueprint(provenance, BuildOptions(dtype=torch.bfloat16, device="cpu", head=provenance.head))
