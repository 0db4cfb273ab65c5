"""Names of other projects and of the Hugging Face Hub, and configurations in YAML and JSON."""

import json

import pytest
from tiny_run import TOKENIZER, tiny_run
from worded import override

from compass_jax.commands import work
from compass_jax.commands.cli import main
from compass_jax.commands.configured import load_config
from compass_jax.commands.options import ImportHf
from compass_jax.commands.settings import settings
from compass_jax.config import ConfigError, DataConfig, FileSource, RunConfig, apply
from compass_jax.config.foreign import TRL, VERL, hub_hint
from compass_jax.config.io import config_to_json, to_plain
from compass_jax.data.files import DataError, files_of
from compass_jax.training.from_files import rl_config


@pytest.mark.parametrize("name", [*TRL, *VERL])
def test_names_of_other_projects_are_told_ours_which_exist(name):
    config = load_config("tiny_reasoning_cpu")
    known = {setting.key for setting in settings(config)} | {"rl.objective.kl_coef"}
    our_name = TRL.get(name) or VERL[name]
    assert (
        our_name.startswith("--")
        or our_name.replace(",", " ").replace(":", " ").split()[0] in known
    )
    form = name if name in VERL else f"--{name.replace('_', '-')}"
    with pytest.raises(ConfigError) as error:
        override(config, [f"{form}=3"])
    assert f"'s {name} is called {our_name} here" in str(error.value)
    with pytest.raises(ConfigError, match="is called"):
        apply(config, {name: 3})


@pytest.mark.parametrize(
    ("word", "key"),
    [
        ("--group-size", "rl.group_size"),
        ("--clip-grad-norm=1", "rl.optim.clip_grad_norm"),
        ("--slots", "rollout.slots"),
        ("--grup-size", "rl.group_size"),
        ("--system_prompt", "data.system_prompt"),
    ],
)
def test_a_setting_without_its_section_is_told_where_it_is(word, key):
    with pytest.raises(ConfigError, match=f"no such setting; did you mean .*{key}"):
        override(load_config("tiny_reasoning_cpu"), [word, "3"])


def test_settings_that_exist_are_taken():
    words = ["--rl.steps", "3", "--rl.objective.kl-coef=0.1", "--rl.objective", "grpo"]
    config = override(tiny_run(), [*words, "--rollout.slots=4"])
    assert (config.rl.steps, config.rollout.slots, config.rl.objective.name) == (3, 4, "grpo")


@pytest.mark.parametrize("name", ["Qwen/Qwen3-0.6B", "openai/gsm8k", "a-b/c.d_e"])
def test_a_name_of_the_hub_is_answered_with_its_download(name):
    folder = name.partition("/")[2]
    with pytest.raises(ConfigError, match=f"hf download {name} --local-dir {folder} "):
        rl_config(name, ["rows.jsonl"])
    with pytest.raises(DataError, match=f"hf download {name} --repo-type dataset --local-dir"):
        files_of(name)
    with (
        pytest.raises(ConfigError, match="hf download")
        if "." in name
        else pytest.raises(DataError, match="hf download")
    ):
        DataConfig(sources=(FileSource(name),)).validate()
        files_of(name)


@pytest.mark.parametrize("command", [["import-hf", "OUT"], ["check"], ["serve"]])
def test_every_command_that_reads_a_model_names_the_download(command, tmp_path, capsys):
    name, *arguments = command
    words = [str(tmp_path / "out") if x == "OUT" else x for x in arguments]
    assert main([name, "Qwen/Qwen3-0.6B", *words]) == 2
    error = capsys.readouterr().err
    assert "hf download Qwen/Qwen3-0.6B --local-dir Qwen3-0.6B" in error and error.count("\n") == 1


def test_a_failed_import_leaves_no_folder_of_its_own(tmp_path, capsys):
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_text('{"model_type": "qwen3", "hidden_size": 8}')
    for source in ("Qwen/Qwen3-0.6B", str(tmp_path / "nowhere"), str(broken), str(tmp_path)):
        assert main(["import-hf", source, str(tmp_path / "new" / "run")]) == 2
        assert not (tmp_path / "new").exists(), source
    there = tmp_path / "there"
    (there / "sub").mkdir(parents=True)
    (there / "notes.txt").write_text("mine")
    assert main(["import-hf", str(broken), str(there)]) == 2
    assert main(["import-hf", str(broken), str(there / "sub" / "run")]) == 2
    assert (there / "notes.txt").read_text() == "mine" and (there / "sub").is_dir()
    assert not (there / "sub" / "run").exists()
    capsys.readouterr()


def test_an_interrupted_import_leaves_no_folder(tmp_path, monkeypatch):
    def interrupted(*arguments, **options):
        (tmp_path / "run" / "checkpoints" / "half").mkdir(parents=True)
        raise KeyboardInterrupt

    monkeypatch.setattr("compass_jax.weights.convert.import_hf", interrupted)
    with pytest.raises(KeyboardInterrupt):
        work.import_hf(ImportHf(src="model", out=str(tmp_path / "run")))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["runs/a/b", "./a/b", "/a/b", "rows", "a/", "../a"])
def test_other_paths_are_no_names_of_the_hub(name, tmp_path, monkeypatch):
    assert hub_hint(name) == ""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a" / "b").mkdir(parents=True)
    assert hub_hint("a/b") == "", "it is there"


def as_yaml(value, indent=0):
    """Returns a plain value as block YAML, without the library that reads it."""
    pad = " " * indent
    if isinstance(value, dict) and value:
        return "".join(
            f"{pad}{key}:\n{as_yaml(x, indent + 2)}"
            if isinstance(x, dict) and x
            else f"{pad}{key}: {json.dumps(x)}\n"
            for key, x in value.items()
        )
    return f"{pad}{json.dumps(value)}\n"


@pytest.mark.parametrize("ending", ["yaml", "yml", "json"])
def test_a_configuration_in_yaml_or_json_is_the_same(tmp_path, ending):
    config = tiny_run()
    path = tmp_path / f"run.{ending}"
    text = config_to_json(config) if ending == "json" else as_yaml(to_plain(config))
    path.write_text(text)
    assert load_config(str(path)) == config


SHORT = f"""
name: short
model:
  {{family: qwen3, vocab_size: 384, hidden: 32, layers: 1, heads: 4, kv_heads: 2, head_dim: 8,
  ffn: 32}}
data:
  tokenizer: {TOKENIZER}
  sources:
    - {{path: rows.jsonl, verifier: {{math: 1.0, format: 0.2}}}}
    - dataset: chain_sum
rl:
  optim: {{learning_rate: 1e-5}}
  objective: {{name: grpo, kl_coef: 4e-2}}
"""


def test_a_short_yaml_says_what_differs(tmp_path):
    (tmp_path / "short.yaml").write_text(SHORT)
    config = load_config(str(tmp_path / "short.yaml"))
    assert isinstance(config, RunConfig) and config.rl.optim.learning_rate == 1e-5
    assert [type(x).__name__ for x in config.data.sources] == ["FileSource", "ProceduralSource"]
    assert config.rl.objective.kl_coef == 0.04
    assert config.data.sources[0].verifier == (("math", 1.0), ("format", 0.2))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            ("learning_rate", "lerning_rate"),
            "rl.optim.lerning_rate: no such setting; did you mean rl.optim.learning_rate",
        ),
        (("rl:", "num_generations: 8\nrl:"), "TRL's num_generations is called rl.group_size here"),
        (("name: short", "name: short\nname: b"), "name: is there twice"),
        (("1e-5", "fast"), "rl.optim.learning_rate"),
        (("name: short", "name: [short"), "it is no YAML"),
        (("path:", "pth:"), "data.sources.0.kind"),
    ],
)
def test_what_a_yaml_cannot_say_is_refused_with_the_file(tmp_path, change, message):
    path = tmp_path / "short.yaml"
    path.write_text(SHORT.replace(*change))
    with pytest.raises(ConfigError) as error:
        load_config(str(path))
    assert str(error.value).startswith(f"{path}: ") and message in str(error.value)
