"""D3D: block-diffusion drafting for lossless speculative decoding on stock SGLang.

SGLang finds the package by its entry point (plugin.py). This module imports nothing: SGLang loads plugins in
each of its processes, and most of them need none of the rest.
"""

__version__ = "0.1.0"
