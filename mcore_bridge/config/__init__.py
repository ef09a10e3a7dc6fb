"""HF configs in, ``TransformerConfig`` and ``ParallelDims`` out. It imports ``errors``, ``arguments``, ``cpu`` and
``installed``. Only ``mesh/process_groups.py`` and ``mesh/lost_ranks.py`` use torch.distributed.
"""
