"""Scripted episodes of environments of verifiers, for the cold starts of episode_curves.py.

    PYTHON benchmarks/scripted_episodes.py ENVIRONMENT FOLDER [--episodes 1000]

It runs under an interpreter that has verifiers, textarena and the environments, and imports nothing
of this package. It writes FOLDER/model, a tokenizer of bytes with a token for each text that the
environment always says, and FOLDER/episodes.jsonl, the messages as the renderer writes them.

Hangman: with probability SKILL the letter in most words that fit the board, else any other one.
scratchpad: a call with the prompt's word, then the word that came back; no word of a task.
code_golf: programs of a few forms, with numbers that are mostly wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import itertools
import json
import random
import re
import string
from collections.abc import Callable, Iterator
from pathlib import Path

from renderers import create_renderer
from renderers.base import load_tokenizer
from renderers.configs import PrimeQwen3RendererConfig
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

Message = dict
Episode = tuple[list[Message], list[dict]]  # messages and tools
SKILL = 0.25
FIRST_SEED = 1_000_000  # of a scripted game; tasks have the seeds from 0
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKS = (
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
)
ROLES = ("system\n", "user\n", "assistant\n")
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content']"
    " + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
TURN = re.compile(r"<\|im_start\|>(\w+)\n(.*?)<\|im_end\|>\n", re.DOTALL)


def user(text: str) -> Message:
    """Returns a message of the environment."""
    return {"role": "user", "content": text}


def reply(text: str) -> Message:
    """Returns a turn of the model."""
    return {"role": "assistant", "content": text}


def hangman(rng: random.Random) -> Iterator[Episode]:
    """Yields games of TextArena's Hangman."""
    import textarena
    from nltk.corpus import words
    from verifiers.v1.tasksets.textarena.taskset import SYSTEM_PROMPT, _latest_feedback

    known = [word.upper() for word in words.words("en-basic")]
    for seed in itertools.count(FIRST_SEED):
        random.seed(seed)
        game = textarena.make(env_id="Hangman-v0")
        game.reset(num_players=1)
        messages = [
            {"role": "system", "content": SYSTEM_PROMPT},
            user(str(game.get_observation()[1])),
        ]
        while True:
            state = game.state.game_state
            letter = guess(known, state["current_board"], state["guessed_letters"], rng)
            messages.append(reply(f"[{letter}]"))
            game.step(messages[-1]["content"])
            if game.state.done:
                break
            messages.append(user(_latest_feedback(str(game.get_observation()[1]))))
        yield messages, []


def guess(known: list[str], board: list[str], guessed: set[str], rng: random.Random) -> str:
    """Returns the next letter of the script."""
    free = [letter for letter in string.ascii_uppercase if letter not in guessed]
    if rng.random() >= SKILL:
        return rng.choice(free)
    counts = collections.Counter(
        letter
        for word in known
        if len(word) == len(board)
        and all((a == b) if b != "_" else a not in guessed for a, b in zip(word, board))
        for letter in set(word) - guessed
    )
    return counts.most_common(1)[0][0] if counts else rng.choice(free)


def hangman_texts() -> list[str]:
    """Returns what Hangman always says, cell by cell, and the replies."""
    messages, _ = next(hangman(random.Random(0)))
    opening = re.split(r"\n\nC00.*\n[ _]*\n", messages[1]["content"].replace(" _ \n", " _\n"))
    heads = [" ".join(f"C{i:02}" for i in range(n)) + "\n" for n in range(1, 15)]
    cells = [f"  {value}{end}" for value in ("_", *string.ascii_uppercase) for end in (" ", "")]
    refusal = "You attempted an invalid move. Reason: You guessed the letter '"
    refused = (
        "' which has already been guessed. Please resubmit a valid move and remember to follow the"
        " game rules to avoid penalties."
    )
    replies = [f"[{letter}]" for letter in string.ascii_uppercase]
    return [messages[0]["content"], *opening, *heads, *cells, refusal, refused, *replies]


def scratchpad(rng: random.Random) -> Iterator[Episode]:
    """Yields round trips of words."""
    from mcp.server.mcpserver import MCPServer
    from nltk.corpus import words
    from scratchpad.servers.scratchpad import ScratchpadToolset, ScratchpadToolsetConfig
    from scratchpad.taskset import INSTRUCTION, WORDS

    server = MCPServer("scratchpad")
    ScratchpadToolset(ScratchpadToolsetConfig()).register(server)
    (tool,) = asyncio.run(server.list_tools())
    name = f"scratchpad_{tool.name}"
    function = {
        "name": name,
        "description": tool.description,
        "parameters": tool.input_schema,
    }
    known = [x.lower() for x in words.words("en-basic") if 4 <= len(x) <= 8]
    known = [word for word in known if word not in WORDS]
    while True:
        word = rng.choice(known)
        call = {"id": "call_0", "type": "function"}
        call["function"] = {"name": name, "arguments": json.dumps({"word": word})}
        messages = [
            user(INSTRUCTION.format(word=word)),
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "call_0", "name": name, "content": word},
            reply(word),
        ]
        yield messages, [{"type": "function", "function": function}]


def scratchpad_texts() -> list[str]:
    """Returns what scratchpad always says, and the parts of a call."""
    from scratchpad.taskset import INSTRUCTION

    call = "\n<function=scratchpad_roundtrip>\n<parameter=word>\n"
    return [*INSTRUCTION.split("{word}"), call, "\n</parameter>\n</function>\n"]


def code_golf(rng: random.Random) -> Iterator[Episode]:
    """Yields programs."""
    from code_golf.taskset import SYSTEM, CodeGolfTaskset

    while True:
        name, description, _ = rng.choice(CodeGolfTaskset.SPECS)
        program = PROGRAMS[name](rng)
        prompt = f"{SYSTEM}\n\nPrint {description}."
        yield [user(prompt), reply(f"```python\n{program}\n```")], []


def _sum(rng: random.Random) -> str:
    if rng.random() < 0.5:
        return f"print(sum(range({rng.randint(0, 2)}, {rng.randint(99, 102)})))"
    return f"print({rng.randint(99, 101)} * {rng.randint(99, 102)} // {rng.randint(1, 3)})"


def _fibonacci(rng: random.Random) -> str:
    first, second, count = rng.randint(0, 1), rng.randint(1, 2), rng.randint(9, 11)
    head = f"a, b = {first}, {second}\nfor i in range({count}):\n"
    return head + "    print(a, end=' ')\n    a, b = b, a + b"


def _reverse(rng: random.Random) -> str:
    if rng.random() < 0.5:
        return f'print("HELLO"[::{rng.choice([-3, -2, -1, 1, 2])}])'
    letters = rng.sample("OLL", 3)
    return f'print("{"".join(letters)}{rng.choice(["EH", "HE"])}")'


PROGRAMS: dict[str, Callable[[random.Random], str]] = {
    "simple-sum": _sum,
    "fibonacci": _fibonacci,
    "reverse-str": _reverse,
}


def code_golf_texts() -> list[str]:
    """Returns the prompts, and the ends of a block."""
    from code_golf.taskset import SYSTEM, CodeGolfTaskset

    prompts = [f"{SYSTEM}\n\nPrint {text}." for _, text, _ in CodeGolfTaskset.SPECS]
    return [*prompts, "```python\n", "\n```"]


ENVIRONMENTS = {
    "hangman": (hangman, hangman_texts),
    "scratchpad": (scratchpad, scratchpad_texts),
    "code_golf": (code_golf, code_golf_texts),
}


def write_tokenizer(folder: Path, texts: list[str]) -> None:
    """Writes a tokenizer of bytes with a token for each text."""
    byte_names = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {name: number for number, name in enumerate(byte_names)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(x, special=True, normalized=False) for x in SPECIAL])
    fixed = dict.fromkeys(x for x in (*MARKS, *ROLES, *texts) if len(x) > 1)
    tokenizer.add_tokens([AddedToken(x, special=False, normalized=False) for x in fixed])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": SPECIAL[0],
        "eos_token": SPECIAL[2],
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1_000_000,
        "chat_template": TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))
    # the renderer's stop tokens have to be end tokens of the run
    ends = {"eos_token_id": [tokenizer.token_to_id(x) for x in (SPECIAL[2], SPECIAL[0])]}
    (folder / "generation_config.json").write_text(json.dumps(ends))


def main() -> None:
    """Writes the tokenizer and the episodes of an environment."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("environment", choices=ENVIRONMENTS)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--episodes", type=int, default=1000)
    options = parser.parse_args()
    play, texts = ENVIRONMENTS[options.environment]
    model = options.folder / "model"
    fixed = texts()
    write_tokenizer(model, fixed)

    def text_of(episode: Episode) -> str:
        messages, tools = episode
        rendered = renderer.render(messages, tools=tools or None)
        return tokenizer.decode(rendered.token_ids, skip_special_tokens=False)

    def load() -> None:
        nonlocal tokenizer, renderer
        tokenizer = load_tokenizer(str(model))
        renderer = create_renderer(tokenizer, PrimeQwen3RendererConfig())

    tokenizer = renderer = None
    load()
    episodes = play(random.Random(0))
    first = next(episodes)
    # the system's message, with the tools, is a text that is always said
    (opening, *_) = TURN.findall(text_of(first))
    if opening[0] == "system" and opening[1] not in fixed:
        write_tokenizer(model, [opening[1], *fixed])
        load()
    with (options.folder / "episodes.jsonl").open("w") as file:
        for episode in itertools.islice(itertools.chain([first], episodes), options.episodes):
            turns = [{"role": x, "content": y} for x, y in TURN.findall(text_of(episode))]
            file.write(json.dumps({"messages": turns}) + "\n")
    longest = max(len(tokenizer.encode(text_of(x))) for x in itertools.islice(episodes, 50))
    print(json.dumps({"tokens": len(tokenizer), "longest": longest}))


if __name__ == "__main__":
    main()
