"""What trainers need around a model: sequences packed and cut for context parallelism, log-probabilities, a forward."""
