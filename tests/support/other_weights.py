"""A second checkpoint of a tiny model, so that a weight update changes what is sampled."""

import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file


def with_other_weights(model_path: Path, directory: Path, seed: int = 7) -> Path:
    """A copy of a model whose weights differ by a third of their size; norms stay as they are."""
    target = shutil.copytree(model_path, directory / "other-weights")
    generator = torch.Generator().manual_seed(seed)
    for file in target.glob("*.safetensors"):
        tensors = load_file(file)
        for name, tensor in tensors.items():
            if tensor.dim() > 1:
                noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float32)
                tensors[name] = (tensor.float() + noise * tensor.float().std() / 3).to(tensor.dtype).contiguous()
        save_file(tensors, file, metadata={"format": "pt"})
    return target
