"""A model and a tokenizer of 64 words, as a folder that frameworks load."""

from __future__ import annotations

from pathlib import Path


def write_model(folder: Path) -> None:
    """Write both; the model's weights are bfloat16."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    words = ["<pad>", "<eos>", *map(str, range(62))]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")
    made.chat_template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    made.save_pretrained(folder)
    config = Qwen3Config(
        vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=64, tie_word_embeddings=False,
        pad_token_id=0, eos_token_id=1,
    )  # fmt: skip
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
