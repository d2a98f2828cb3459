"""GRPO as one writes it by hand: transformers generates, a function rewards, AdamW learns in mini-batches."""

import copy
import time

import torch
from own_timers import DEVICE, WIDTHS, timed, write
from transformers import Qwen2Config, Qwen2ForCausalLM

STEPS, PROMPTS, GROUP, NEW_TOKENS = 5, 4, 4, 20


def log_probs(model, sequences):
    logits = model(sequences).logits[:, :-1]
    return torch.log_softmax(logits, -1).gather(-1, sequences[:, 1:, None]).squeeze(-1)


def reward(sequences):
    time.sleep(0.02)  # a judge that is asked over the network
    return torch.tensor([float(sum(token % 2 for token in row)) for row in sequences.tolist()])


def main():
    torch.manual_seed(0)
    torch.set_default_device(DEVICE)
    wide = WIDTHS[DEVICE]
    config = Qwen2Config(
        vocab_size=512 * wide, hidden_size=64 * wide, intermediate_size=128 * wide, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128,
    )  # fmt: skip
    actor = Qwen2ForCausalLM(config)
    ref = copy.deepcopy(actor).eval()
    optimizer = torch.optim.AdamW(actor.parameters(), lr=1e-4)
    for _step in range(STEPS):
        with timed("step"):
            prompts = torch.randint(0, 512, (PROMPTS, 8)).repeat_interleave(GROUP, 0)
            with timed("rollout.generate"):
                sequences = actor.generate(prompts, max_new_tokens=NEW_TOKENS, do_sample=True, pad_token_id=0)
            with timed("idle"):
                rewards = reward(sequences).view(PROMPTS, GROUP)
            advantages = ((rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-6)).view(-1, 1)
            with timed("actor.old_log_prob"), torch.no_grad():
                old = log_probs(actor, sequences)
            with timed("ref.log_prob"), torch.no_grad():
                of_ref = log_probs(ref, sequences)
            with timed("actor.update"):
                for mini_batch in torch.arange(len(sequences)).split(8):
                    optimizer.zero_grad()
                    for rows in mini_batch.split(4):
                        new = log_probs(actor, sequences[rows])
                        ratio, away = (new - old[rows]).exp(), of_ref[rows] - new
                        loss = -(ratio * advantages[rows]).mean() + 0.01 * (away.exp() - away - 1).mean()
                        (loss / 2).backward()
                    optimizer.step()
                loss.item()  # as one logs it
    write()


main()
