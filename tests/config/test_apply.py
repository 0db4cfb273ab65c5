"""One function for settings by name, and one configuration for the same words in every form."""

import json
from dataclasses import replace

import pytest
from logged import lines
from tiny import random_params
from tiny_run import TOKENIZER, tiny_run

import compass_jax
from compass_jax.commands import cli, library
from compass_jax.commands.configured import load_config
from compass_jax.config import ConfigError, RLConfig, RunConfig, apply
from compass_jax.config.io import config_from_json, config_to_json, read_config, to_plain
from compass_jax.config.words import read_arguments
from compass_jax.experience.step_policies.screening import Screening
from compass_jax.rl.objectives.espo import Espo
from compass_jax.rl.objectives.grpo import Grpo
from compass_jax.training.from_files import rl_config
from compass_jax.training.presets import METHOD, PRESETS, preset
from compass_jax.weights.hf import save_params

REWARD = """
def score(row, response):
    return float(len(set(response)) % 3 == 0)
"""
SHORT = {"rl.steps": 2, "rollout.max_new_tokens": 8, "data.eval_prompts": 2, "mesh.fsdp": 1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    home, model = tmp_path_factory.mktemp("forms"), tiny_run().model
    save_params(
        random_params(model, scale=0.1), model, home / "model", "float32", tokenizer_from=TOKENIZER
    )
    rows = [{"prompt": f"{n} + 1?", "answer": str(n + 1)} for n in range(24)]
    (home / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (home / "my_reward.py").write_text(REWARD)
    return home


def by_command(folder, settings, preset=""):
    words = ["--model", "model", "--data", "rows.jsonl", "--reward", "my_reward.py:score"]
    words += ["--preset", preset] * bool(preset)
    return cli.main(["train", *words, *[f"--{key}={x}" for key, x in settings.items()]])


def by_yaml(folder, settings, preset=""):
    text = "model: model\ndata: rows.jsonl\nreward: my_reward.py:score\n"
    text += f"preset: {preset}\n" * bool(preset) + "rl:\n"
    rl = {key: x for key, x in settings.items() if key.startswith("rl.")}
    text += "".join(f"  {key[3:]}: {x}\n" for key, x in rl.items())
    text += "".join(f"{key}: {json.dumps(settings[key])}\n" for key in settings if key not in rl)
    (folder / "run.yaml").write_text(text)
    return cli.main(["train", "run.yaml"])


def by_call(folder, settings, preset=""):
    method = {"method": preset} if preset else {}
    run_dir, settings = settings["run_dir"], {x: settings[x] for x in settings if x != "run_dir"}
    files = "model", "rows.jsonl", "my_reward.py:score"
    compass_jax.train(*files, run_dir=run_dir, settings=settings, **method)
    return 0


def by_python_file(folder, settings, preset=""):
    (folder / "run.py").write_text(
        "from compass_jax.training.from_files import rl_config\n\ndef run():\n"
        "    return rl_config('model', ['rows.jsonl'], 'my_reward.py:score',"
        f" method={preset or 'screened'!r}, settings={settings})\n"
    )
    return cli.main(["train", "run.py"])


FORMS = {"command": by_command, "yaml": by_yaml, "call": by_call, "python": by_python_file}
CLOCKS = ("time/", "memory/", "rollout/tokens_per_s", "train/tokens_per_s", "train/mfu")


def test_the_same_paths_give_the_same_run_in_every_form(folder, monkeypatch):
    monkeypatch.chdir(folder)
    runs = {}
    for form, start in FORMS.items():
        assert start(folder, {**SHORT, "run_dir": f"runs/{form}"}) == 0
        logged = [row["metrics"] for row in lines(folder / "runs" / form, "metrics")]
        metrics = [
            {key: x for key, x in row.items() if not key.startswith(CLOCKS)} for row in logged
        ]
        config = replace(read_config(f"runs/{form}"), run_dir="")
        runs[form] = config_to_json(config), metrics
    assert len(runs["command"][1]) == 2 and len(runs["command"][1][0]) > 40
    for form in FORMS:
        assert runs[form] == runs["command"], form


@pytest.mark.parametrize("form", FORMS)
def test_a_preset_is_a_word_of_every_form(folder, form, monkeypatch):
    monkeypatch.chdir(folder)
    seen = []

    def ended(config, **_):
        seen.append(config)
        return STOPPED
        yield

    monkeypatch.setattr(library, "rl_steps", ended)
    monkeypatch.setattr(
        __import__("compass_jax.training.rl", fromlist=["run_rl"]),
        "run_rl",
        lambda config, **_: seen.append(config) or STOPPED,
    )
    FORMS[form](folder, {**SHORT, "run_dir": "runs/none"}, "espo")
    expected = rl_config("model", ["rows.jsonl"], "my_reward.py:score", method="espo")
    assert seen[0].rl.objective == Espo() and seen[0].rl.zero_variance.rl_zvp
    assert seen[0].rl.group_size == expected.rl.group_size and seen[0].rl.steps == 2


STOPPED = {"stopped": True, "status": 0}


def test_a_preset_replaces_the_method_of_a_configuration_and_no_rate():
    run = apply(tiny_run(), {"rollout.slots": 64})
    for name in PRESETS:
        rl = apply(run, {"preset": name}).rl
        paper = preset(name, run.rollout.max_new_tokens)
        sizes = ("prompts_per_step", "group_size", "updates_per_rollout")
        for key in METHOD:
            if key not in sizes:
                assert getattr(rl, key) == getattr(paper, key), (name, key)
        assert rl.prompts_per_step * rl.group_size <= 64
        assert rl.optim.learning_rate == run.rl.optim.learning_rate and rl.steps == run.rl.steps
    changed = apply(run, {"rl.group_size": 5, "preset": "espo", "rl.objective": "gspo"})
    assert (changed.rl.group_size, changed.rl.objective.name) == (5, "gspo")
    words = {"rl.step_policy": "screening", "rl.objective": "dapo"}
    assert apply(run, words) == apply(run, dict(reversed(words.items())))
    assert apply(run, words).rl.step_policy == Screening()
    with pytest.raises(ConfigError, match="preset 'ppo': choose one of screened, compass_max"):
        apply(run, {"preset": "ppo"})


def test_a_configuration_without_a_word_on_it_trains_the_default_preset():
    usual, paper = RLConfig(), preset("screened", 128)
    assert replace(paper, prompts_per_step=16) == usual
    assert usual.objective == Grpo() and usual.step_policy == Screening(n0=2)
    assert usual.zero_variance.posterior and not usual.zero_variance.rl_zvp
    run = RunConfig("mine", tiny_run().model)
    assert apply(run, {"preset": "screened"}) == run


LONG = f"""
name: long
model: model
data: {{tokenizer: {TOKENIZER}, sources: [{{path: rows.jsonl, verifier: exact}}]}}
preset: dapo
rl: {{steps: 4, objective: {{name: dapo, kl_coef: 0.1}}, optim.learning_rate: 1e-5}}
rollout: {{max-new-tokens: 40, slots: 32}}
"""


def test_a_file_with_sections_takes_a_preset_and_dotted_names(folder, monkeypatch):
    monkeypatch.chdir(folder)
    (folder / "long.yaml").write_text(LONG)
    config = load_config("long.yaml")
    assert config.rl.zero_variance.dynamic_sampling and config.rl.step_policy is None
    assert config.rl.objective == Grpo(clip_high=0.28, mean="tokens", kl_coef=0.1)
    assert config.rl.shaping.overlong_buffer_tokens == 8 and config.rl.steps == 4
    assert config.rl.optim.learning_rate == 1e-5 and config.rl.prompts_per_step == 4


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("data: rows.jsonl", "need all of model: FOLDER and data: FILE"),
        ("model: model\nreward: math", "need all of model: FOLDER and data: FILE"),
        ("model: {family: qwen3}\ndata: rows.jsonl", "`data: FILE` takes `model: FOLDER`"),
        ("model: model\ndata: [1, 2]", "data = [1, 2]: `data: FILE` takes"),
        ("model: model\ndata: rows.jsonl\nreward: 3", "reward = 3: `data: FILE` takes"),
        ("model: model\ndata: rows.jsonl\npreset: ppo", "preset 'ppo': choose one of"),
        ("model: model\ndata: rows.jsonl\nrl: {stepz: 3}", "did you mean rl.steps"),
        ("model: model\ndata: rows.jsonl\nrl: {steps: many}", "rl.steps = 'many': the wrong type"),
        ("model: models\ndata: rows.jsonl", "there is no such folder"),
    ],
)
@pytest.mark.parametrize("is_command", [True, False])
def test_a_wrong_short_file_is_one_line_with_its_name(
    folder, text, message, is_command, monkeypatch, capsys
):
    monkeypatch.chdir(folder)
    (folder / "wrong.yaml").write_text(text)
    if is_command:
        assert cli.main(["train", "wrong.yaml"]) == 2
        error = capsys.readouterr().err.removeprefix("compass train: ")
    else:
        with pytest.raises(ConfigError) as raised:
            load_config("wrong.yaml")
        error = str(raised.value)
    assert error.startswith("wrong.yaml: ") and message in error and error.count("\n") <= 1


def test_what_the_command_line_says_beside_a_short_file_wins(folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    (folder / "both.yaml").write_text(
        "model: model\ndata: rows.jsonl\nreward: {exact: 1.0, math: 0.5}\npreset: gspo\nseed: 3\n"
    )
    words = ["both.yaml", "--preset", "grpo", "--rollout.max-new-tokens", "16", "--dry-run"]
    assert cli.main(["train", *words, "--json"]) == 0
    config = config_from_json(capsys.readouterr().out)
    assert (config.rollout.max_new_tokens, config.seed) == (16, 3)
    assert config.rl.objective.name == "grpo" and config.rl.objective.kl_coef == 0.04
    assert config.rl.buckets[-1] == config.rollout.prompt_buckets[-1] + 16
    assert config.data.sources[0].verifier == (("exact", 1.0), ("math", 0.5))
    assert cli.main(["train", "both.yaml", "--rl.lr", "1"]) == 2
    assert capsys.readouterr().err == (
        "compass train: rl.lr: no such setting; did you mean rl.optim.learning_rate?\n"
    )
    assert cli.main(["train", "both.yaml", "--reward", "exact"]) == 2
    assert "--reward is for --model" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("rl.lr", r"did you mean rl\.optim\.learning_rate\?"),
        ("lr", r"did you mean sft\.optim\.learning_rate or rl\.optim\.learning_rate\?"),
        ("sft.lr", r"did you mean sft\.optim\.learning_rate\?"),
        ("rl.wd", r"did you mean rl\.optim\.weight_decay\?"),
        ("rl.group_sise", r"did you mean rl\.group_size"),
        ("rollout.max_tokens", r"did you mean rollout\.max_new_tokens"),
        ("steps", r"did you mean sft\.steps or rl\.steps\?"),
        ("rl.optim.learning_rate.x", "no such setting"),
        ("model.moe.router.power", "no such setting"),
    ],
)
def test_an_unknown_setting_is_answered_with_the_nearest(name, key):
    for form in (lambda: {name: 1}, lambda: read_arguments([f"--{name}", "1"])):
        with pytest.raises(ConfigError, match=f"^{name}: .*{key}"):
            apply(tiny_run(), form())


THREE, BOTH = {"name": "screening", "n0": 3}, {"exact": 1.0, "length": 0.5}
RANGE = {"ratio_range": (0.5, 2.0), "name": "icepop"}


@pytest.mark.parametrize(
    ("words", "settings"),
    [
        ("--rl.steps 7", {"rl": {"steps": 7}}),
        ("--rl.optim.schedule cosine", {"rl": {"optim": {"schedule": "cosine"}}}),
        ("--rl.buckets 60 70", {"rl.buckets": [60, 70]}),
        ("--trackers", {"trackers": []}),
        (
            "--rl.step-policy screening --rl.step-policy.n0 3",
            {"rl": {"step_policy": THREE}},
        ),
        ("--rl.objective dapo", {"rl": {"objective": "dapo"}}),
        ("--rl.objective dr_grpo", {"rl.objective.name": "dr_grpo"}),
        (
            "--data.sources.0.verifier exact 1 length 0.5",
            {"data.sources.0.verifier": BOTH},
        ),
        ("--rl.drafts none --evaluation.at 1 2", {"rl.drafts": None, "evaluation": {"at": [1, 2]}}),
        ("--rollout-mesh.fsdp 2", {"rollout_mesh.fsdp": 2}),
        (
            "--rl.correction icepop --rl.correction.ratio-range 0.5 2",
            {"rl.correction": RANGE},
        ),
    ],
)
def test_words_and_values_change_the_same(words, settings):
    by_words = apply(tiny_run(), read_arguments(words.split()))
    assert by_words == apply(tiny_run(), settings) != tiny_run() or "none" in words


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rl.steps": "4"}, r"rl\.steps = '4': the wrong type, it must be int"),
        ({"rl.optim.learning_rate": float("nan")}, r"learning_rate = nan: must be a finite"),
        ({"rl.objective": "ppo"}, r"rl\.objective\.name = 'ppo': no such objective"),
        ({"rl.objective": {"name": 3}}, r"rl\.objective\.name = '3': no such objective"),
        ({"rl": 3}, "rl = 3: the wrong type"),
        ({"data.sources.1.repeat": 2}, r"data\.sources\.1\.repeat: no such setting"),
        ({"model": "folder"}, "model = 'folder': the wrong type"),
    ],
)
def test_a_wrong_value_is_refused_with_its_name(settings, message):
    with pytest.raises(ConfigError, match=message):
        apply(tiny_run(), settings)


def test_a_record_of_a_version_without_step_policies_has_none():
    plain = to_plain(tiny_run())
    del plain["rl"]["step_policy"]
    assert config_from_json(json.dumps(plain)) == tiny_run()


def test_a_setting_that_became_a_hook_is_refused_by_every_form():
    words = read_arguments(["--rl.group-replay.groups", "8"])
    for settings in ({"rl.group_replay.groups": 8}, {"rl.group_replay": {"groups": 8}}, words):
        with pytest.raises(ConfigError, match=r"it is the hook of examples/group_replay\.py now"):
            apply(tiny_run(), settings)


def test_growth_at_a_higher_temperature_is_refused_by_every_form():
    name, message = "rl.zero_variance.grow_temperature", "grow_temperature: groups grow at the temp"
    words = read_arguments(["--rl.zero-variance.grow-temperature", "1.6"])
    section = {"rl.zero_variance": {"rl_zvp": True, "grow_to": 8, "grow_temperature": 1.6}}
    for settings in ({name: 1.6}, section, words):
        with pytest.raises(ConfigError, match=message):
            apply(tiny_run(), settings)
    plain = to_plain(tiny_run())
    plain["rl"]["zero_variance"]["grow_temperature"] = 1.6
    with pytest.raises(ConfigError, match=message):
        config_from_json(json.dumps(plain))


def test_a_record_of_growth_at_the_temperature_of_the_rollout_is_read():
    plain = to_plain(tiny_run())
    plain["rl"]["zero_variance"]["grow_temperature"] = 1.0
    assert config_from_json(json.dumps(plain)) == tiny_run()
    assert apply(tiny_run(), {"rl.zero_variance.grow_temperature": 1}) == tiny_run()
