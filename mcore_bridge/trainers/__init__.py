"""The faces that trainers drive: the surfaces of other bridges over ours. It imports all but ``commands``."""
