"""Rows for the tiny pipeline."""


def asked(count):
    for n in range(count):
        yield {"prompt": f"{n} + {n} =", "answer": str(2 * n)}


def taught(count):
    for n in range(count):
        talk = [("user", f"{n} + 1 ="), ("assistant", str(n + 1))]
        yield {"messages": [{"role": role, "content": text} for role, text in talk]}


def none(count):
    return []
