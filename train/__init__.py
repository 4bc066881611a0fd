"""Training a drafter: prompts, the target's answers, packed batches, DeepSpeed, a drafter SGLang serves."""
