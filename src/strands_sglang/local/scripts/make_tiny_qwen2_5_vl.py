"""Makes a Qwen2.5-VL of 0.7 million random weights with the tokenizer of `make_tiny_qwen3.py`, which is beside it.

Runs in the SGLang environment. Usage: make_tiny_qwen2_5_vl.py OUTPUT_DIRECTORY CHAT_TEMPLATE.jinja

The image processor has the published parameters but for the number of pixels, which is small: an image is a few dozen
tokens.
"""

import sys
from pathlib import Path

import torch
from make_tiny_qwen3 import CONTEXT, VOCABULARY, train_tokenizer  # type: ignore[import-not-found]
from transformers import (
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLProcessor,
    Qwen2VLImageProcessor,
    Qwen2VLVideoProcessor,
)

IMAGE_TOKENS = {
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
}


def main() -> None:
    """Write processor and model to the directory named on the command line."""
    target = Path(sys.argv[1])
    tokenizer = train_tokenizer(Path(sys.argv[2]).read_text(encoding="utf-8"))
    tokenizer.add_tokens(list(IMAGE_TOKENS.values()), special_tokens=True)
    assert len(tokenizer) == VOCABULARY + len(IMAGE_TOKENS), len(tokenizer)
    torch.manual_seed(0)
    config = Qwen2_5_VLConfig(
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": CONTEXT,
            "rope_parameters": {"rope_type": "default", "mrope_section": [4, 6, 6], "rope_theta": 1e6},
            "tie_word_embeddings": False,
            # As for the text model: a next token that is a clear winner.
            "initializer_range": 0.2,
            "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": tokenizer.pad_token_id,
            "bos_token_id": None,
        },
        vision_config={
            "depth": 2,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_heads": 4,
            "out_hidden_size": 128,
            "fullatt_block_indexes": [1],
        },
        tie_word_embeddings=False,
        **{name: tokenizer.convert_tokens_to_ids(token) for name, token in IMAGE_TOKENS.items()},
    )
    Qwen2_5_VLForConditionalGeneration(config).float().save_pretrained(target)
    images = Qwen2VLImageProcessor(patch_size=14, merge_size=2, min_pixels=56 * 56, max_pixels=224 * 224)
    videos = Qwen2VLVideoProcessor(patch_size=14, merge_size=2)
    Qwen2_5_VLProcessor(images, tokenizer, videos, chat_template=tokenizer.chat_template).save_pretrained(target)
    images.save_pretrained(target)  # also where older versions look for it


if __name__ == "__main__":
    main()
