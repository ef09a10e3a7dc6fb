"""The files of Megatron's ``torch`` format, one for each place on a mesh. It imports ``factory``, ``weights`` and
``convert/parameters``."""
