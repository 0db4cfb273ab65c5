"""`compass try` plays an episode of an environment."""

import dataclasses
from pathlib import Path

import pytest
from served import MODEL, TOKENIZER, parameters

from compass_jax.commands.cli import main
from compass_jax.weights.hf import save_params

GUESS = Path(__file__).parents[2] / "examples" / "environments" / "guess.py"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("try") / "tiny"
    config = dataclasses.replace(MODEL, max_positions=1024)
    save_params(parameters(), config, folder, "float32", tokenizer_from=TOKENIZER)
    return str(folder)


def test_the_turns_are_printed_with_their_tokens_and_the_reward(model, capsys):
    assert main(["try", f"{GUESS}:Guess", "--model", model, "--number", "3"]) == 0
    text = capsys.readouterr().out
    parts = [line for line in text.splitlines() if line.startswith("──")]
    assert parts[0].startswith("── given, ") and parts[1].startswith("── the model, ")
    assert "I think of a number from 1 to 5." in text
    assert parts[-1].startswith("── reward ") and "turns: " in text and "branches: 1" in text


ECHO = """
from compass_jax.rewards.tasks import Turn

class Echo:
    def __init__(self, word): self.word = word
    def rows(seed): return [{"prompt": "Say it."}]
    def reset(self, row): return f"Say {self.word}."
    def step(self, message): return Turn(reward=1.0)
"""


def test_options_are_arguments_of_the_class(model, capsys, tmp_path):
    (tmp_path / "echo.py").write_text(ECHO)
    words = ["try", f"{tmp_path}/echo.py:Echo", "--model", model]
    assert main([*words, "--options", '{"word": "tea"}']) == 0
    assert "Say tea." in capsys.readouterr().out
    assert main(words) == 2 and "required argument: 'word'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "is an environment, which a model plays: --model FOLDER"),
        (["--model", "none"], "--model none: there is no such folder"),
        (["--number", "200"], "--number 200: there are 200 rows"),
    ],
)
def test_what_cannot_be_played_is_refused_by_name(model, capsys, words, message):
    words = ["--model", model, *words] if "--number" in words else words
    assert main(["try", f"{GUESS}:Guess", *words]) == 2
    assert message in capsys.readouterr().err


def test_the_rows_of_an_environment_are_shown_without_tokens(model, capsys):
    assert main(["data", "--model", model, "--env", f"{GUESS}:Guess"]) == 0
    text = capsys.readouterr().out
    assert "Guess, the prompt of an episode's row; compass try plays one:" in text
    assert "I think of a number from 1 to" in text and "tokens: shortest" not in text
