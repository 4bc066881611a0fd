<<<<<<< HEAD
"""Training a drafter: prompts, the target's answers, packed batches, DeepSpeed, a checkpoint to serve."""
=======
"""Training a drafter: prompts, the target's answers, packed batches, DeepSpeed, a drafter SGLang serves."""
>>>>>>> 7f625ab953be4ec9f58b503c0456a075695202bf
