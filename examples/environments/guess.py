"""A game with a state: the model finds a number from the hints of the environment."""

from compass_jax.rewards.tasks import Turn


class Guess:
    @staticmethod
    def rows(seed):
        for n in range(200):
            prompt = f"I think of a number from 1 to {n % 8 + 2}. Guess it; write the number alone."
            yield {"prompt": f"{prompt} Game {n}.", "number": n % (n % 8 + 2) + 1}

    def reset(self, row):
        self.number, self.tries = row["number"], 0
        return [{"role": "user", "content": row["prompt"]}]

    def step(self, message):
        self.tries += 1
        text = message.content.strip()
        if text == str(self.number):
            return Turn(reward=1.0 / self.tries)
        hint = "It is higher." if text.isdigit() and int(text) < self.number else "It is lower."
        return Turn([{"role": "user", "content": hint}])
