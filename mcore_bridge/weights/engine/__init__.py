"""Write the tensors of an engine by a map of its loader, without calling the loader.

- Find the map: ``map_engine``, with ``recorder``, ``traced_storage`` and ``probe``.
- Prove it: ``prove``.
- Write by it: ``mapped_engine`` and ``rounds_by_map`` in the engine's process, ``writer`` and ``export_into`` in the
  trainer's. Both use ``group_copies``. ``engine_tensors`` finds the engine's tensors.

An engine's process, which has only torch and numpy, can import everything here but ``export_into``.
"""
