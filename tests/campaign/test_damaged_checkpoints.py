"""A damaged checkpoint is refused by a clear error, or gives the weights that were saved."""

import os

from campaign_files import (
    assert_clear_error,
    assert_same_tensors,
    damage_bytes,
    exported_tensors,
)

from compass_jax.commands.cli import main
from compass_jax.weights import checkpoint


def test_damage_to_a_checkpoint_is_an_error_or_changes_no_weight(draw, tuned, capsys):
    assert main(["export-hf", "run", "sound"]) == 0
    newest = checkpoint.locate("run")
    file = draw.choice(sorted(x for x in newest.rglob("*") if x.is_file()))
    kind = draw.choice(["damage", "damage", "damage", "gone", "folder", "pipe"])
    data = file.read_bytes()
    file.unlink()
    if kind == "damage":
        file.write_bytes(damage_bytes(data, draw))
    elif kind == "folder":
        file.mkdir()
    elif kind == "pipe":
        os.mkfifo(file)
    capsys.readouterr()
    status = main(["export-hf", str(newest), "out"])
    if status:
        assert_clear_error(status, capsys.readouterr().err, (newest.name, file.name))
    else:
        assert_same_tensors(exported_tensors(tuned / "out"), exported_tensors(tuned / "sound"))
