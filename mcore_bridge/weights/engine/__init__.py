"""The tensors of an engine, written by a map of its loader and without the loader.

- Find the map: ``map_engine``, with ``recorder``, ``traced_storage`` and ``probe``.
- Prove it: ``prove``.
- Write by it: ``mapped_engine`` and ``rounds_by_map`` in the engine's process, ``writer`` and ``export_into`` in the
  trainer's. Both use ``group_copies``. ``engine_tensors`` looks for the engine's tensors.

An engine's process imports all of it but ``export_into``, and has torch and numpy alone.
"""
