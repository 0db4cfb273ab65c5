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


def pairs(count):
    """Yields preferences: the larger of two digits is the better answer."""
    for n in range(count):
        one, two = n % 7, n % 5
        verdict = "Tie" if one == two else "Better" if one > two else "Worse"
        row = {"prompt": f"{n}: a digit?", "candidate": str(one), "anchor": str(two)}
        yield {**row, "verdict": verdict}


def odd(prompt, response, **row):
    """Accepts about every second answer of a random model, and no empty one."""
    return float(len(response.strip()) % 2)
