"""A user's file that is broken is refused by one clear error that names it."""

import pytest
from campaign_files import CONFIG, assert_clear_error

from compass_jax.commands.cli import main

DAMAGE = {
    "gone": lambda path: path.unlink(),
    "cut": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "not text": lambda path: path.write_bytes(b"\xff\xfe" + path.read_bytes()),
}
TRAIN, TUNE, IMPORT = ["train", CONFIG], ["sft", CONFIG], ["import-hf", "hf", "out"]
FILES = {
    "rows.jsonl": TRAIN,
    "chats.jsonl": TUNE,
    "tokenizer/tokenizer.json": TRAIN,
    "tokenizer/tokenizer_config.json": TRAIN,
    "tokenizer/chat_template.jinja": TRAIN,
    "hf/config.json": IMPORT,
    "hf/model.safetensors.index.json": IMPORT,
    "hf/model-00001-of-00003.safetensors": IMPORT,
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("name", FILES)
def test_a_broken_file_is_one_clear_error(name, damage, files, capsys):
    path = files / name
    if path.suffix == ".jinja":  # without this file the template of tokenizer_config.json is used
        (path.parent / "tokenizer_config.json").write_text('{"eos_token": "<|im_end|>"}')
    DAMAGE[damage](path)
    status = main(FILES[name])
    assert_clear_error(status, capsys.readouterr().err, (path.name, path.parent.name))
