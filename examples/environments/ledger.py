"""An environment whose tools are a server's: the model books amounts, and the ledger is judged."""

import json
import urllib.request

from compass_jax.rewards.tasks import Turn
from compass_jax.rewards.tasks.tools import Tools


class Ledger:
    """`url` is the address of server.py."""

    def __init__(self, url="http://127.0.0.1:8765"):
        self.url = url
        self._tools = Tools(self.book, self.balance)
        self.tools = self._tools.schemas

    @staticmethod
    def rows(seed):
        for n in range(100):
            amount, account = n % 9 + 1, "abc"[n % 3]
            yield {
                "prompt": f"Book {amount} to the account {account}, entry {n}, then say done.",
                "account": account,
                "amount": amount,
            }

    def reset(self, row, seed):
        self.row, self.ledger = row, f"{seed} {id(self)}"
        return [{"role": "user", "content": row["prompt"]}]

    def step(self, message):
        if message.calls or message.malformed:
            return Turn(self._tools.answer(message))
        right = json.loads(self.balance(self.row["account"]))["balance"] == self.row["amount"]
        return Turn(reward=float(right), components={"booked": float(right)})

    def book(self, account: str, amount: int) -> str:
        """Books an amount to an account."""
        return self._post("book", account=account, amount=amount)

    def balance(self, account: str) -> str:
        """Returns the balance of an account."""
        return self._post("balance", account=account)

    def _post(self, tool, **arguments):
        headers = {"content-type": "application/json", "x-ledger": self.ledger}
        body = json.dumps(arguments).encode()
        request = urllib.request.Request(f"{self.url}/{tool}", body, headers)
        with urllib.request.urlopen(request, timeout=10) as reply:
            return reply.read().decode()
