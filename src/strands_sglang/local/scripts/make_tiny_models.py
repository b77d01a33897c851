"""Makes tiny models of random weights with a tokenizer of 512 tokens. Runs in the SGLang environment.

Usage: make_tiny_models.py KIND OUTPUT_DIRECTORY CHAT_TEMPLATE.jinja

The tokenizer has the structure of Qwen's: byte-level BPE, so that any text has an encoding, the
ChatML marks as special tokens, and the marks of reasoning and tool calls as added tokens that
decoding keeps.
"""

import json
import sys
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLProcessor,
    Qwen2VLImageProcessor,
    Qwen2VLVideoProcessor,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

VOCABULARY = 512
CONTEXT = 4096
CONTROL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MARKS = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
IMAGE_TOKENS = {
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
}


def train_tokenizer(chat_template: str) -> PreTrainedTokenizerFast:
    """Train a small BPE on text that looks like agent conversations."""
    sentences = [
        f"Please call the tool number {i} and tell me the answer, then user and assistant go on." for i in range(200)
    ]
    calls = [
        json.dumps({"name": "calculator", "arguments": {"expression": f"{i} + {7 * i}"}, "type": "function"})
        for i in range(200)
    ]
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.train_from_iterator(
        [*sentences, *calls, "system user assistant tool tools parameters properties description required"],
        trainers.BpeTrainer(
            vocab_size=VOCABULARY - len(MARKS),
            special_tokens=CONTROL_TOKENS,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    bpe.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in MARKS])
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
        chat_template=chat_template,
    )


def make_text_model(kind: str, target: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    """Write a Qwen3 of 0.4 million weights, or a Qwen3-MoE of 0.9 million.

    The latter has three layers, each with eight experts of which two are used: layers, experts and experts per token
    are three different numbers, so that a mix-up of the axes of what the server returns cannot go unseen.
    """
    common = {
        "vocab_size": VOCABULARY,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": CONTEXT,
        "tie_word_embeddings": False,
        # Wide enough that the next token, and an expert, is a clear winner: greedy decoding depends on it.
        "initializer_range": 0.2,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": None,
    }
    if kind == "qwen3":
        model = Qwen3ForCausalLM(Qwen3Config(num_hidden_layers=2, **common))
    else:
        # Every layer is one of experts, and the weights of the chosen two sum to 1, as in the published Qwen3 models.
        experts = {"moe_intermediate_size": 64, "num_experts": 8, "num_experts_per_tok": 2}
        config = Qwen3MoeConfig(num_hidden_layers=3, decoder_sparse_step=1, norm_topk_prob=True, **experts, **common)
        model = Qwen3MoeForCausalLM(config)
    model.float().save_pretrained(target)
    tokenizer.save_pretrained(target)


def make_vision_model(target: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    """Write a Qwen2.5-VL of 0.7 million weights.

    The image processor has the published parameters but for the number of pixels, which is small: an image is a few
    dozen tokens.
    """
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


def main() -> None:
    """Write tokenizer and model of the kind to the directory, both named on the command line."""
    kind, target = sys.argv[1], Path(sys.argv[2])
    tokenizer = train_tokenizer(Path(sys.argv[3]).read_text(encoding="utf-8"))
    # Every id below the vocabulary size must be a token: the server may sample any of them.
    assert len(tokenizer) == VOCABULARY, len(tokenizer)
    torch.manual_seed(0)
    if kind == "qwen2_5_vl":
        tokenizer.add_tokens(list(IMAGE_TOKENS.values()), special_tokens=True)
        make_vision_model(target, tokenizer)
    else:
        make_text_model(kind, target, tokenizer)


if __name__ == "__main__":
    main()
