"""The faces that trainers drive: the surfaces of other bridges over ours, so that a trainer needs no other code."""
