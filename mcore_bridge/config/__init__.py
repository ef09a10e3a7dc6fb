"""HF configs in, TransformerConfig and ParallelDims out: pure, no process group."""
