"""Translation between SGLang's structures and ours: the worker's neighbours, all that see SGLang."""
