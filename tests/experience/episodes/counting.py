"""Environments that the tests of episodes play."""

import os
import time
from types import SimpleNamespace

from compass_jax.rewards.tasks import Environment, Turn


class Counting:
    """Asks `asks` times, and rewards answers of an even number of characters."""

    asks = 3
    sleep_s = 0.0

    def __init__(self, **options):
        for name, value in options.items():
            setattr(self, name, value)

    @staticmethod
    def rows(seed):
        for n in range(12):
            yield {"prompt": f"Count to {n}.", "n": n}

    def reset(self, row):
        self.texts, self.n = [], row["n"]
        return [{"role": "user", "content": row["prompt"]}]

    def step(self, message):
        time.sleep(self.sleep_s)
        self.texts.append(message.content)
        reward = float(len(message.content) % 2 == 0)
        if len(self.texts) == self.asks:
            return Turn(reward=reward, components={"length": float(len(message.content))})
        return Turn([{"role": "user", "content": f"And {self.n}?"}], reward=reward)


class Waiting(Counting):
    """Its methods are coroutines."""

    async def reset(self, row, seed):
        self.seed = seed
        return super().reset(row)

    async def step(self, message):
        return super().step(message)


class Stepping(Counting):
    """Reads of a turn what comes before a call: without tools a chat's content has the call's text,
    and a Message's content has not.
    """

    def step(self, message):
        text = message.content.partition("<tool_call>")[0].rstrip()
        return super().step(SimpleNamespace(content=text))


class Chatting:
    """Plays the episodes of Stepping as a harness that has a client of OpenAI's."""

    rows = Counting.rows

    def play(self, row, base_url):
        import openai

        counting = Stepping()
        messages = counting.reset(row)
        with openai.OpenAI(base_url=base_url, api_key="none", max_retries=0) as client:
            while True:
                choice = client.chat.completions.create(model="policy", messages=messages).choices[
                    0
                ]
                turn = counting.step(choice.message)
                if not turn.messages or choice.finish_reason == "length":
                    return turn
                messages += [choice.message, *turn.messages]


class Failing(Counting):
    """Fails at every row but those whose number is even, each in another way."""

    def step(self, message):
        if self.n % 6 == 1:
            raise RuntimeError("the shop is closed")
        if self.n % 6 == 3:
            time.sleep(60)
        if self.n % 6 == 5:
            return Turn(reward=float("nan"))
        return super().step(message)


class Closed(Counting):
    """Fails until a file is there."""

    sign = ""

    def step(self, message):
        if not os.path.exists(self.sign):
            raise RuntimeError("the shop is closed")
        return super().step(message)


class Dying(Counting):
    """Its process ends once, in the episode of an odd row."""

    folder = ""

    def step(self, message):
        mark = f"{self.folder}/died"
        if self.n % 2 and not os.path.exists(mark):
            open(mark, "w").close()
            os._exit(7)
        return super().step(message)


class Replayed(Environment):
    """An environment of a Task, which no driver plays."""

    rows = Counting.rows


class Priced(Counting):
    """Needs an option."""

    def __init__(self, price):
        self.price = price
