"""Makes a Qwen3 model of 0.4 million random weights with a tokenizer of 512 tokens. Runs in the SGLang environment.

Usage: make_tiny_qwen3.py OUTPUT_DIRECTORY CHAT_TEMPLATE.jinja

The tokenizer has the structure of Qwen's: byte-level BPE, so that any text has an encoding, the
ChatML marks as special tokens, and the marks of reasoning and tool calls as added tokens that
decoding keeps.
"""

import json
import sys
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

VOCABULARY = 512
CONTEXT = 4096
CONTROL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MARKS = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]


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


def main() -> None:
    """Write tokenizer and model to the directory named on the command line."""
    target = Path(sys.argv[1])
    tokenizer = train_tokenizer(Path(sys.argv[2]).read_text(encoding="utf-8"))
    # Every id below the vocabulary size must be a token: the server may sample any of them.
    assert len(tokenizer) == VOCABULARY, len(tokenizer)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=False,
        # Wide enough that the next token is not nearly uniform: greedy decoding then has clear winners.
        initializer_range=0.2,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    Qwen3ForCausalLM(config).float().save_pretrained(target)
    tokenizer.save_pretrained(target)


if __name__ == "__main__":
    main()
