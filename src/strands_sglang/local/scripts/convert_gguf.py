"""Turns a GGUF file of a Llama model into a Hugging Face folder.

Runs in the SGLang environment, with the shim on its path.

Usage: convert_gguf.py FILE.gguf OUTPUT_DIRECTORY

Writes the dequantised weights as bfloat16 safetensors, the configuration, and the tokenizer with its chat template.
"""

import sys
from pathlib import Path

import torch
from transformers import AutoTokenizer, LlamaForCausalLM


def main() -> None:
    """Convert the file named on the command line."""
    source, target = Path(sys.argv[1]), Path(sys.argv[2])
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    quantised = LlamaForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    # A model that was loaded from GGUF refuses to be saved; one that merely got its weights does not.
    config = quantised.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = LlamaForCausalLM(config)
    model.load_state_dict(quantised.state_dict())
    model.to(torch.bfloat16).save_pretrained(target)
    tokenizer.save_pretrained(target)


if __name__ == "__main__":
    main()
