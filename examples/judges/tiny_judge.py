"""Write a tiny chat model that answers `yes` or `no` to everything, to try a judge of your own: `python tiny_judge.py
judge`.

Its weights are random, so its verdicts mean nothing, but they depend on the question.
"""

import sys

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from rlhfless.prepare.byte_tokenizer import byte_tokenizer


def write(folder: str, seed: int = 0) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(["yes", "no"])
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64,
        max_position_embeddings=4096,
        initializer_range=0.15,
        tie_word_embeddings=False,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(config)
    yes, no = tokenizer.convert_tokens_to_ids(["yes", "no"])
    messages = [{"role": "system", "content": "You are a judge."}, {"role": "user", "content": "1 2 3"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 0] = 8.0  # the same for all tokens, so that the head can rely on it
        hidden = model.model(torch.tensor([tokenizer(text)["input_ids"]])).last_hidden_state[0, -1]
        taste = torch.randn(64)
        taste -= (taste @ hidden) / (hidden @ hidden) * hidden  # of this question, yes and no are equally likely
        model.lm_head.weight.zero_()
        model.lm_head.weight[[yes, no], 0] = 4.0
        model.lm_head.weight[yes] += 3 * taste
        model.lm_head.weight[no] -= 3 * taste
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    write(sys.argv[1])
