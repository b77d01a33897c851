"""Makes a Qwen3-MoE model of 0.9 million random weights with the tokenizer of `make_tiny_qwen3.py`, which is beside it.

Runs in the SGLang environment. Usage: make_tiny_qwen3_moe.py OUTPUT_DIRECTORY CHAT_TEMPLATE.jinja

Three layers, each with eight experts of which two are used: layers, experts and experts per token are three different
numbers, so that a mix-up of the axes of what the server returns cannot go unseen.
"""

import sys
from pathlib import Path

import torch
from make_tiny_qwen3 import CONTEXT, VOCABULARY, train_tokenizer  # type: ignore[import-not-found]
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM


def main() -> None:
    """Write tokenizer and model to the directory named on the command line."""
    target = Path(sys.argv[1])
    tokenizer = train_tokenizer(Path(sys.argv[2]).read_text(encoding="utf-8"))
    assert len(tokenizer) == VOCABULARY, len(tokenizer)
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        moe_intermediate_size=64,
        num_hidden_layers=3,
        num_experts=8,
        num_experts_per_tok=2,
        # Every layer is one of experts, and the weights of the chosen two sum to 1, as in the published Qwen3 models.
        decoder_sparse_step=1,
        norm_topk_prob=True,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=False,
        # As for the dense model: a next token, and here also an expert, that is a clear winner.
        initializer_range=0.2,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    Qwen3MoeForCausalLM(config).float().save_pretrained(target)
    tokenizer.save_pretrained(target)


if __name__ == "__main__":
    main()
