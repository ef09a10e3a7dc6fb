"""What is sent in place of a shard: the shard with its adapters merged, or its codes and scales."""
