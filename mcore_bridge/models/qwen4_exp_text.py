"""The text of Qwen4-Exp: gated residual streams, linear attention, attention to pools, and embeddings of n-grams."""

from mcore_bridge.architecture import Architecture
from mcore_bridge.config.fields import Ignore
from mcore_bridge.config.tables import DECODER, but
from mcore_bridge.config.tables.linear_attention import DELTA_INDEXED
from mcore_bridge.config.tables.moe import EXPERT_SIZE, ROUTED, SHARED_BY_GATE, SOFTMAX_BY_CONFIG
from mcore_bridge.config.tables.ngrams import NGRAMS
from mcore_bridge.config.tables.scales import LOW_RANK_STREAMS
from mcore_bridge.models import blocks, blocks_delta, blocks_sparse
from mcore_bridge.models.qwen3_5_moe_text import NO_DENSE

ATTENTION = {
    "linear_attention": (*blocks_delta.DELTA_NET, *blocks_delta.DELTA_IN),
    "indexed_attention": (*blocks_delta.GATED_GQA, *blocks.O_BIAS, *blocks.QK_NORM, *blocks_sparse.MEAN_POOLS),
}
ARCHITECTURE = Architecture(
    model_type="qwen4_exp_text",
    fields=(
        *but(DECODER, *DELTA_INDEXED, *LOW_RANK_STREAMS, *NGRAMS, NO_DENSE),
        *(*ROUTED, *SOFTMAX_BY_CONFIG, *SHARED_BY_GATE, EXPERT_SIZE),
        Ignore("it counts the states of a cache", ("number_of_conv_states",)),
        Ignore("it describes MTP layers, which are not built", ("mtp",)),
    ),
    rules=lambda hf: (
        *blocks.decoder(
            *(blocks.MOE, blocks.SHARED_GATED, blocks_sparse.LOW_RANK_STREAMS),
            final_norm=blocks_sparse.LOW_RANK_MERGE,
        ),
        *blocks.by_kind(hf, ATTENTION),
        *blocks_sparse.ngrams(hf.to_dict()),
    ),
    mtp=lambda hf: ("mtp.*",),
)
