"""Mixtral: mistral with softmax-routed experts in every layer, with other names."""

from mcore_bridge.architecture import Architecture
from mcore_bridge.config.tables import BIAS_NONE, DECODER, QK_PLAIN, WINDOW_ALL, but
from mcore_bridge.config.tables.moe import NO_SHARED, ONE_SIZE, ROUTED, SOFTMAX_NORMALISED
from mcore_bridge.models.blocks import GQA, NORMS, W123, W123_STACKS, decoder

ARCHITECTURE = Architecture(
    model_type="mixtral",
    fields=(
        *(*but(DECODER, ONE_SIZE), *BIAS_NONE, *WINDOW_ALL, *QK_PLAIN),
        *(*ROUTED, *SOFTMAX_NORMALISED, *NO_SHARED),
    ),
    rules=lambda hf: decoder(NORMS, GQA, W123),
    renamed_in_memory=W123_STACKS,
)
