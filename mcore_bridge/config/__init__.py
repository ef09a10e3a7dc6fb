"""From HF configs to ``TransformerConfig`` and ``ParallelDims``. It imports ``errors``, ``cpu`` and ``plugins``. Only
``mesh/process_groups.py`` and ``mesh/lost_ranks.py`` use processes.
"""
