"""Conversations with tools in asyncio: each turn is generated in a thread, and a tool is awaited between two turns.

What generates is a copy of the actor, which gets the actor's weights behind each update.
"""

import asyncio
import copy

import torch
from own_timers import timed, write
from transformers import Qwen2Config, Qwen2ForCausalLM

STEPS, CONVERSATIONS, TURNS = 5, 4, 2
LENGTH = {"max_new_tokens": 8, "min_new_tokens": 8}


async def tool(text):
    """A search that answers after a while."""
    await asyncio.sleep(0.02)
    return (text + 1) % 256


async def converse(engine, turn_at_a_time, prompt):
    text = prompt
    for turn in range(TURNS):
        async with turn_at_a_time:
            text = await asyncio.to_thread(engine.generate, text, do_sample=True, pad_token_id=0, **LENGTH)
        if turn < TURNS - 1:
            text = torch.cat([text, await tool(text[:, -4:])], 1)
    return text


async def rollout(engine):
    turn_at_a_time = asyncio.Semaphore(2)
    prompts = torch.randint(0, 256, (CONVERSATIONS, 1, 8))
    return torch.cat(await asyncio.gather(*(converse(engine, turn_at_a_time, prompt) for prompt in prompts)))


async def score(texts):
    """A judge answers over the network."""
    await asyncio.sleep(0.03)
    return texts.float().mean(1, keepdim=True) / 256


def log_probs(model, texts):
    return torch.log_softmax(model(texts).logits[:, :-1], -1).gather(-1, texts[:, 1:, None]).squeeze(-1)


async def main():
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128,
    )  # fmt: skip
    actor = Qwen2ForCausalLM(config)
    engine = copy.deepcopy(actor).eval().requires_grad_(False)
    optimizer = torch.optim.AdamW(actor.parameters(), lr=1e-4)
    for _step in range(STEPS):
        with timed("step"):
            with timed("rollout.generate"):
                texts = await rollout(engine)
            with timed("idle"):
                rewards = await score(texts)
            with timed("actor.old_log_prob"), torch.no_grad():
                old = log_probs(actor, texts)
            with timed("actor.update"):
                for _epoch in range(2):
                    loss = -((log_probs(actor, texts) - old).exp() * (rewards - rewards.mean())).mean()
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
            with timed("weight_sync"):
                engine.load_state_dict(actor.state_dict())
    write()


asyncio.run(main())
