"""What a policy drew in several turns is what the learner computes over the whole episode."""

from dataclasses import replace

import numpy as np
import torch

from fakes.local_environments import LocalEnvironments, sample_of
from rlhfless.algorithms.batch import pack
from rlhfless.bundled.model import SMALLEST, build_model, build_tokenizer
from rlhfless.bundled.task import TaskRecipe
from rlhfless.chat.messages import Message
from rlhfless.environments.chat_format import PlainFormat
from rlhfless.environments.episode import play_episode
from rlhfless.environments.trajectory import EpisodeLimits, EpisodeTask, GeneratedTurn
from rlhfless.records import FinishReason, Group, Prompt


class Numbers:
    def reset(self, seed: int, row: dict) -> None:
        self.turns = 0

    def observe(self, text: str) -> str:
        self.turns += 1
        return f" {self.turns} 7 "


class Draws:
    """Draws tokens one by one, and notes the logprob of each."""

    def __init__(self, network, end):
        self.network, self.end = network, end

    async def generate(self, token_ids, *, seed, max_tokens):
        generator = torch.Generator().manual_seed(seed)
        ids, logprobs = list(token_ids), []
        while len(logprobs) < max_tokens and (not logprobs or ids[-1] != self.end):
            with torch.no_grad():
                row = self.network(torch.tensor([ids])).logits[0, -1].log_softmax(-1)
            token = int(torch.multinomial(row.exp(), 1, generator=generator))
            ids.append(token)
            logprobs.append(float(row[token]))
        reason = FinishReason.STOP if ids[-1] == self.end else FinishReason.LENGTH
        return GeneratedTurn(tuple(ids[len(token_ids) :]), reason, tuple(logprobs))


async def test_logprobs_of_every_turn_are_those_of_the_whole_episode_and_others_get_no_gradient():
    tokenizer = build_tokenizer(TaskRecipe(), 256)
    network = build_model(tokenizer, SMALLEST, 0)
    chat = PlainFormat(tokenizer)
    task = EpisodeTask("p", 0, {}, 5, messages=(Message("user", ("1 2 3",)),))
    limits = EpisodeLimits(turns=4, turn_tokens=9)
    model = Draws(network, tokenizer.eos_token_id)
    episode = await play_episode(task, model, chat, LocalEnvironments(Numbers), limits)
    assert len(episode.turns) == 4
    batch = pack([Group(Prompt("p", (), ""), (sample_of(replace(episode, reward=1.0)),))])
    logits = network(torch.tensor(batch.tokens)[None]).logits[0, :-1]
    logits.retain_grad()
    logprobs = logits.log_softmax(-1).gather(1, torch.tensor(batch.tokens[1:])[:, None])[:, 0]
    learned = torch.tensor(batch.response_mask[1:])
    drawn = np.concatenate([turn.generated.logprobs for turn in episode.turns])
    assert np.allclose(logprobs[learned].detach(), drawn, atol=1e-5)
    (logprobs * learned).sum().backward()
    assert bool((logits.grad[~learned] == 0).all())
    assert bool((logits.grad[learned] != 0).any(1).all())
