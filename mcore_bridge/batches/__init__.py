"""Functions for trainers around a model: pack sequences, cut them for context parallelism, forward, log-probs."""
