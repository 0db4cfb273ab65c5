"""An environment of benchmarks/episode_kills.py: a client, a process of its own, plays each episode
through the door. Its reward is a function of the sampled tokens, and at least LEAST.
"""

import json
import subprocess
import sys
import time
import urllib.request

TURNS, TURN, OPENING, REPLY = 3, 8, 12, 6  # turns, and the tokens of a turn, opening and reply
TOOL_S = 0.1  # after each turn
LEAST = 0.25


class Relay:
    """Starts the client, and judges what it sampled."""

    @staticmethod
    def rows(seed):
        """Returns the tasks."""
        return [{"prompt": f"Episode {n}.", "n": n} for n in range(8)]

    def play(self, row, base_url):
        """Plays an episode."""
        from compass_jax.rewards.tasks import Turn  # which the client does without

        words = [sys.executable, "-S", "-E", __file__, base_url, str(row["n"])]
        client = subprocess.run(words, stdout=subprocess.PIPE)
        if client.returncode:
            raise RuntimeError(f"the client ended with status {client.returncode}")
        sampled = json.loads(client.stdout)
        return Turn(reward=LEAST + (1 - LEAST) * (sum(sampled) % 4) / 4)


def turn(base_url, tokens):
    """Returns the tokens of the model's next turn."""
    body = json.dumps({"token_ids": tokens, "sampling_params": {"max_tokens": TURN}}).encode()
    url = base_url.removesuffix("/v1") + "/inference/v1/generate"
    request = urllib.request.Request(url, body, {"content-type": "application/json"})
    with urllib.request.urlopen(request) as reply:
        return json.load(reply)["choices"][0]["token_ids"]


def main(base_url, n):
    """Plays episode `n`, and prints the sampled tokens."""
    tokens, sampled = [3 + (n + i) % 200 for i in range(OPENING)], []
    for _ in range(TURNS):
        new = turn(base_url, tokens)
        time.sleep(TOOL_S)
        sampled += new
        tokens = [*tokens, *new, *(3 + i for i in range(REPLY))]
    print(json.dumps(sampled))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
