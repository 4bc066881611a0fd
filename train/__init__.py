"""Training a drafter: prompts, the answers of the target, packed batches, DeepSpeed, a checkpoint to serve."""
