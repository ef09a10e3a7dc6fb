"""Whether a config can be built: the checks of ``build_model`` that need no weights, before any weight is read."""

from __future__ import annotations

from dataclasses import dataclass

from mcore_bridge.architecture import architectures, composites, read_hf, refusals
from mcore_bridge.errors import BridgeError
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
    return make_blueprint(provenance, BuildOptions(device="cpu", head=provenance.head))


@dataclass(frozen=True, slots=True)
class Support:
    """Whether a config can be built. It is true if it can.

    Attributes:
        model_type: the ``model_type`` of the config; empty if it cannot be read.
        reason: why the config cannot be built; empty if it can.
        parameters: the number of parameters of the whole model; 0 if it cannot be built.

    Example:
        >>> bool(mb.Support("bloom", "positions are a bias of the scores", 0))
        False
    """

    model_type: str
    reason: str
    parameters: int

    def __bool__(self) -> bool:
        return not self.reason


def supports(hf: HF) -> Support:
    """Whether ``build_model`` builds a config here, with the installed releases. No weight is read.

    Args:
        hf: a folder, a hub name in the local cache, or a ``PretrainedConfig``.

    Returns:
        The answer. It is true or false, and has the reason of a refusal, which ``build_model`` would raise.

    Raises:
        BridgeError: never. A folder without a config is an answer, too.

    Example:
        >>> support = mb.supports("path/of/Qwen3-8B")
        >>> bool(support), support.model_type
        (True, 'qwen3')
    """
    model_type = getattr(hf, "model_type", "")
    try:
        model_type = model_type or read_hf(hf).model_type
        blueprint = require_supported(hf)
    except BridgeError as error:
        return Support(model_type, str(error), 0)
    return Support(model_type, "", blueprint.counts.total)


def list_families() -> dict[str, str]:
    """All families by ``model_type``. Families that packages register with an entry point are among them.

    Returns:
        For each ``model_type``, why it is refused; an empty string if its configs can be built.
        A value of a single config may still be refused: see ``supports``.

    Example:
        >>> families = mb.list_families()
        >>> families["qwen3"], families["bloom"][:35]
        ('', 'positions are a bias of the scores ')
    """
    known = dict.fromkeys({**architectures(of_packages=True), **composites()}, "")
    refused = {name: refusal.reason for refusal in refusals() for name in refusal.model_types}
    return dict(sorted((refused | known).items()))
