"""HF configs in, ``TransformerConfig`` and ``ParallelDims`` out. It imports ``errors``, ``arguments``, ``cpu`` and
``installed``; ``mesh/process_groups.py`` and ``mesh/lost_ranks.py`` alone know of processes."""
