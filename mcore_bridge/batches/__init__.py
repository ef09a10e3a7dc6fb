"""What trainers need around a model: packed sequences, cut for context parallelism; a forward; log-probabilities."""
