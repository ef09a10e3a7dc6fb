"""HF configs in, ``TransformerConfig`` and ``ParallelDims`` out. It imports ``errors``, ``cpu`` and ``plugins``;
``mesh/process_groups.py`` and ``mesh/lost_ranks.py`` alone know of processes."""
