"""An environment of benchmarks/episode_slots.py: its tool takes half a second a turn."""

import asyncio
import json
import urllib.request

from compass_jax.rewards.tasks import Turn

TOOL_S = 0.5
OPENING, REPLY, TURN = 32, 16, 24  # tokens: of the first request, of the tool, of the model's turn


def sampled(base_url, tokens):
    """Returns the model's next turn."""
    body = json.dumps({"token_ids": tokens, "sampling_params": {"max_tokens": TURN}}).encode()
    url = base_url.removesuffix("/v1") + "/inference/v1/generate"
    request = urllib.request.Request(url, body, {"content-type": "application/json"})
    with urllib.request.urlopen(request) as reply:
        return json.load(reply)["choices"][0]["token_ids"]


class SlowTool:
    """Has `turns` turns; its reward is that of a coin that the last token throws."""

    def __init__(self, turns=8):
        self.turns = turns

    @staticmethod
    def rows(seed, turns=8):
        """Returns the tasks."""
        return [{"prompt": f"Episode {n}.", "n": n} for n in range(200)]

    async def play(self, row, base_url):
        """Plays an episode."""
        loop = asyncio.get_running_loop()
        tokens = [3 + (row["n"] + i) % 200 for i in range(OPENING)]
        for _ in range(self.turns):
            new = await loop.run_in_executor(None, sampled, base_url, tokens)
            await asyncio.sleep(TOOL_S)
            tokens = [*tokens, *new, *[3 + i for i in range(REPLY)]]
        return Turn(reward=float(new[-1] % 2))
