"""A run from a model's folder, a file of prompts and a reward alone: the command, and the call."""

import dataclasses
import json
import math
import shutil
import sys
import types
from pathlib import Path

import pytest
from evolve import evolve
from logged import lines
from tiny_run import tiny_run
from worded import override

import compass_jax
from compass_jax.commands import library
from compass_jax.commands.cli import main
from compass_jax.commands.configured import config_from_options, load_config
from compass_jax.commands.options import Sft, Train
from compass_jax.commands.settings import field_docs
from compass_jax.config import ConfigError, FileSource, MeshConfig, RunConfig, TaskSource, apply
from compass_jax.config.io import read_config
from compass_jax.config.words import read_arguments
from compass_jax.data.tokenizer import Tokenizer
from compass_jax.experience.step_policies.screening import Screening
from compass_jax.model.params import param_count
from compass_jax.rl.objectives.espo import Espo
from compass_jax.rl.objectives.grpo import Grpo
from compass_jax.rl.objectives.gspo import Gspo
from compass_jax.training import from_files
from compass_jax.training.from_files import _whole_share, rl_config, sft_config
from compass_jax.training.presets import PRESETS

TOKENIZER = Path(__file__).parents[2] / "configs" / "tiny_tokenizer"
REWARD = """
def score(row, response):
    return float(len(set(response)) % 3 == 0)
"""
FAST = {
    "rl.steps": 1,
    "rl.prompts_per_step": 2,
    "rl.group_size": 3,
    "rl.updates_per_rollout": 1,
    "rollout.slots": 8,
    "rollout.max_new_tokens": 8,
    "rl.buckets": (64,),
    "data.eval_prompts": 0,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Writes a model as transformers does, prompts of two lengths, chats and a reward; returns
    their folder.
    """
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    home = tmp_path_factory.mktemp("home")
    torch.manual_seed(0)
    sizes = {"vocab_size": 384, "hidden_size": 16, "intermediate_size": 32, "head_dim": 8}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    model = Qwen3MoeForCausalLM(
        Qwen3MoeConfig(**sizes, **heads, **experts, max_position_embeddings=160)
    )
    model.save_pretrained(home / "model")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TOKENIZER / name, home / "model" / name)
    with open(home / "prompts.jsonl", "w") as file:
        for n in range(40):
            row = {"prompt": f"{'What is ' * (n % 2)}{n} + 1?", "answer": str(n + 1)}
            file.write(json.dumps(row) + "\n")
    with open(home / "chats.jsonl", "w") as file:
        for n in range(20):
            chat = [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": "Yes."}]
            file.write(json.dumps({"messages": chat}) + "\n")
    (home / "my_reward.py").write_text(REWARD)
    return home


def config_from(folder, **changes):
    words = {"model": str(folder / "model"), "data": [str(folder / "prompts.jsonl")], **changes}
    return rl_config(**words)


def test_what_is_not_given_is_chosen_by_the_model_the_data_and_the_machine(folder):
    config = config_from(folder, reward=str(folder / "my_reward.py:score"))
    config.validate_for_rl()
    assert config.name == "model-prompts" and config.init_from == str(folder / "model")
    assert (config.model.hidden, config.model.moe.experts) == (16, 8)
    assert config.mesh.devices == 8  # all devices
    assert config.rollout.max_length <= config.model.max_positions
    assert (
        config.rl.buckets[-1] >= config.rollout.prompt_buckets[-1] + config.rollout.max_new_tokens
    )
    assert config == config_from(folder, reward=str(folder / "my_reward.py:score"))


def test_what_follows_from_the_longest_answer_follows_the_one_that_is_asked_for(folder):
    config = config_from(folder, settings={"rollout.max_new_tokens": 24}).validate_for_rl()
    longest = config.rollout.prompt_buckets[-1] + 24
    assert config.rollout.max_new_tokens == 24 and config.rl.buckets[-1] == longest
    assert config.rollout.cache_bucket <= longest
    assert config_from(folder).rl.buckets[-1] > longest
    words = Train(model=str(folder / "model"), data=(str(folder / "prompts.jsonl"),))
    assert config_from_words(words, ["--rollout.max-new-tokens", "24"]) == config
    seeded = config_from_words(words, ["--rollout.max_new_tokens=24", "--seed", "1"])
    assert seeded == evolve(config, seed=1)
    with pytest.raises(ConfigError, match=r"rollout\.max_new_tokens = 'many': the wrong type"):
        config_from_words(words, ["--rollout.max-new-tokens", "many"])


def made_by_command(folder, *overrides, kind=Train, data="prompts.jsonl", **options):
    words = kind(model=str(folder / "model"), data=(str(folder / data),), **options)
    return config_from_words(words, overrides)


def config_from_words(options, words):
    return config_from_options(options, read_arguments(words))


@pytest.mark.parametrize(
    "overrides",
    [
        ("--data.system-prompt", "Answer with a number."),
        ('--data.template-args={"enable_thinking": false}', "--data.system-prompt", "Be short."),
    ],
)
def test_the_prompts_are_measured_with_the_settings_of_the_data(folder, overrides):
    config = made_by_command(folder, *overrides).validate_for_rl()
    training, evaluated = (
        [len(prompt.tokens) for prompt in prompts]
        for prompts in from_files._prompts(config.model, config.scored)
    )
    longest = max(training + evaluated)
    bucket = config.rollout.prompt_buckets[-1]
    assert longest <= bucket < longest + from_files.ROUNDED_TO
    assert bucket > made_by_command(folder).rollout.prompt_buckets[-1]
    assert config.rl.buckets[-1] >= bucket + config.rollout.max_new_tokens


def test_sizes_follow_the_user_s_mesh_slots_and_adapters(folder):
    usual = made_by_command(folder)
    slots = made_by_command(folder, "--rollout.slots", "8")
    assert slots.rollout.slots == 8 < usual.rollout.slots
    few, many = (x.rl.prompts_per_step * x.rl.group_size for x in (slots, usual))
    assert few < many
    mesh = made_by_command(folder, "--mesh.fsdp", "1", "--mesh.replica", "2")
    assert mesh.mesh == MeshConfig(replica=2)
    # half of the slots for which the step was made: a first round has half of its samples
    assert mesh.rollout.slots == 2 * from_files.MOST_SLOTS["cpu"] // 2
    apart = ("--mesh.fsdp", "2", "--rollout-mesh.replica", "4", "--rollout-apart", "True")
    sampling = made_by_command(folder, *apart)
    assert (sampling.mesh.devices, sampling.rollout_mesh) == (2, MeshConfig(replica=4))
    assert sampling.rollout.slots == 4 * from_files.MOST_SLOTS["cpu"] // 2
    rest = made_by_command(folder, *apart[2:])  # of eight devices
    assert rest.mesh == MeshConfig(fsdp=4) and rest.rollout_mesh == MeshConfig(replica=4)
    halves = made_by_command(folder, "--rollout-apart", "True")
    assert halves.mesh == MeshConfig(fsdp=4) and halves.rollout_mesh is None
    with pytest.raises(ConfigError, match=r"^samplers\.address = 'trainer'"):
        made_by_command(folder, "--samplers.address", "trainer")
    with pytest.raises(ConfigError, match=r"mesh\.fsdp = 3"):
        made_by_command(folder, "--mesh.fsdp", "3")
    # fewer pages than the default lengths need; validated with the chosen ones
    pages = made_by_command(folder, "--rollout.cache-pages", "8", "--rollout.max-new-tokens", "16")
    assert pages.validate_for_rl().rollout.cache_pages == 8
    words = Train(model=str(folder / "model"), data=(str(folder / "prompts.jsonl"),))
    assert config_from_words(words, ["--seed=3"]).seed == 3


@pytest.mark.parametrize(
    ("changes", "slots"),
    [
        ((), 32),  # screening: two of four samples first
        (("--rl.step-policy.n0", "3"), 64),
        (("--preset", "grpo"), 64),
        (("--rl.prompts-per-step", "4"), 8),
        (("--rl.prompts-per-step", "4", "--rl.group-size", "8", "--rl.step-policy", "none"), 32),
        (("--rollout.slots", "64"), 64),
    ],
)
def test_a_cpu_has_no_slots_that_a_first_round_leaves_empty(folder, changes, slots):
    one_device = ("--mesh.fsdp", "1")
    assert made_by_command(folder, *one_device, *changes).rollout.slots == slots


def test_an_evaluation_between_steps_costs_a_fourth_of_them_on_a_cpu(folder):
    config = made_by_command(folder, "--mesh.fsdp", "1")
    answers = config.evaluation.prompts * (config.evaluation.k + 1)
    assert answers == 160 == config.rl.eval_every * 16 * 4 // 4  # 10 steps of 64 answers
    assert made_by_command(folder, "--evaluation.prompts", "7").evaluation.prompts == 7
    often = made_by_command(folder, "--mesh.fsdp", "1", "--rl.eval-every", "5").evaluation
    assert often.prompts * (often.k + 1) == 80
    at_the_end = made_by_command(folder, "--rl.eval-every", "0", "--evaluation.at", "3")
    assert at_the_end.evaluation.prompts is None


def test_columns_of_ones_own_are_named_before_the_files_are_read(folder):
    rows = [{"q": f"{n} + 1?", "a": str(n + 1)} for n in range(20)]
    (folder / "own.jsonl").write_text("\n".join(map(json.dumps, rows)))
    fields = ("--data.sources.0.prompt-field", "q", "--data.sources.0.answer-field", "a")
    source = made_by_command(folder, *fields, data="own.jsonl").data.sources[0]
    assert (source.prompt_field, source.answer_field) == ("q", "a")
    fields = ("--sft.prompt-field", "q", "--sft.response-field=a", "--sft.steps", "7")
    sft = made_by_command(folder, *fields, data="own.jsonl", kind=Sft).sft
    assert (sft.prompt_field, sft.steps) == ("q", 7) and sft.buckets[-1] <= 48


def test_the_examples_are_measured_with_the_system_prompt(folder):
    fields = ("--sft.prompt-field", "prompt", "--sft.response-field", "answer")
    usual = made_by_command(folder, *fields, kind=Sft)
    config = made_by_command(folder, *fields, "--data.system-prompt", "xyz" * 15, kind=Sft)
    assert config.sft.buckets[-1] >= usual.sft.buckets[-1] + 32


def test_the_buckets_hold_the_prompts_of_the_evaluation(folder):
    rows = [{"prompt": f"What is {n} + 1? " + "Think. " * 8, "answer": str(n + 1)} for n in (1, 2)]
    (folder / "long.jsonl").write_text("\n".join(map(json.dumps, rows)))
    config = config_from(folder, evaluation=str(folder / "long.jsonl")).validate_for_rl()
    training, evaluated = (
        [len(prompt.tokens) for prompt in prompts]
        for prompts in from_files._prompts(config.model, config.scored)
    )
    assert max(training) < max(evaluated) <= config.rollout.prompt_buckets[-1]
    assert config.rl.prompts_per_step <= len(training)


@pytest.mark.parametrize(
    ("rows", "most", "share"),
    [(16, 6, 4), (16, 16, 16), (3, 64, 3), (12, 5, 4), (48, 7, 6), (13, 4, 4), (1, 1, 1)],
)
def test_the_micro_batches_of_an_update_have_one_shape_if_that_halves_none(rows, most, share):
    assert _whole_share(rows, most) == share


def test_devices_have_equally_many_slots(folder, monkeypatch):
    monkeypatch.setattr(from_files, "_mesh", lambda model, count: MeshConfig(replica=6))
    slots = config_from(folder).rollout.slots
    assert slots % 6 == 0 and math.log2(slots // 6).is_integer()


def test_an_update_on_a_cpu_is_cut_into_equal_micro_batches(folder, monkeypatch):
    monkeypatch.setitem(from_files.MICRO_BATCH_TOKENS, "cpu", 7 * 160)
    monkeypatch.setattr(from_files, "_mesh", lambda model, count: MeshConfig())
    rl = config_from(folder, settings={"rollout.max_new_tokens": 128}, method="gspo").rl
    rows = rl.prompts_per_step * rl.group_size // rl.updates_per_rollout
    size = rl.micro_batch_tokens // rl.buckets[-1]
    assert 1 < size < rows and rows % size == 0


def test_a_large_model_on_a_cpu_gets_small_steps_and_micro_batches_and_few_logits(
    folder, monkeypatch
):
    """A step has half of the prompts, and a first round half of the slots. A micro-batch has half
    of the tokens, in one of three lengths, because padding takes longer than to compile; and the
    logits of one chunk fit a limit: the chunk is the largest power of two of tokens that does.
    """
    monkeypatch.setattr(from_files, "_mesh", lambda model, count: MeshConfig())
    usual = config_from(folder, settings={"rollout.max_new_tokens": 128})
    vocabulary = usual.model.vocab_size
    assert usual.compute.logprob_chunk == 4096
    monkeypatch.setattr(from_files, "MANY_PARAMETERS", 1)
    monkeypatch.setattr(from_files, "MOST_LOGITS_CPU", 700 * vocabulary)
    large = config_from(folder, settings={"rollout.max_new_tokens": 128})
    rl, longest = usual.rl, usual.rl.buckets[-1]
    rows = rl.prompts_per_step * rl.group_size // rl.updates_per_rollout
    assert rl.micro_batch_tokens == _whole_share(rows, 1024 // longest) * longest
    assert large.rl.micro_batch_tokens == 512 // longest * longest
    assert rl.buckets == (longest,)
    assert (usual.rl.prompts_per_step, usual.rollout.slots) == (16, 32)
    assert (large.rl.prompts_per_step, large.rollout.slots) == (8, 16)
    assert large.rl.buckets == (longest - 96, longest - 64, longest)
    assert large.rl.micro_batch_tokens < rl.micro_batch_tokens
    assert large.compute.logprob_chunk == 512
    monkeypatch.setattr(from_files, "MOST_LOGITS_CPU", vocabulary)
    long = {"rollout.max_new_tokens": 128}
    assert config_from(folder, settings=long).compute.logprob_chunk == 128


def test_a_task_of_ones_own_goes_where_a_file_goes(folder):
    (folder / "my_task.py").write_text(
        "from compass_jax.rewards.tasks import Task\n"
        "def prompts(seed):\n"
        "    return [{'prompt': f'Say {n}.', 'answer': str(n)} for n in range(20)]\n"
        "task = Task(prompts)\n"
    )
    task, file = f"{folder}/my_task.py:task", str(folder / "prompts.jsonl")
    config = config_from(folder, data=[task, file], evaluation=task).validate_for_rl()
    assert config.data.sources == (TaskSource(task), FileSource(file))
    assert config.data.eval_sources == (TaskSource(task),)
    assert config.name == "model-my_task-prompts"


def test_a_preset_is_its_papers(folder):
    rl_by_preset = {name: config_from(folder, method=name).rl for name in PRESETS}
    assert rl_by_preset["screened"] == config_from(folder).rl  # the default
    assert rl_by_preset["screened"].step_policy == Screening(n0=2)
    assert (
        rl_by_preset["screened"].objective == Grpo()
        and rl_by_preset["screened"].zero_variance.posterior
    )
    assert rl_by_preset["espo"].objective == Espo() and rl_by_preset["gspo"].objective == Gspo()
    assert (
        rl_by_preset["grpo"].objective == Grpo(kl_coef=0.04)
        and rl_by_preset["grpo"].group_size == 64
    )
    assert (
        rl_by_preset["dapo"].zero_variance.dynamic_sampling
        and rl_by_preset["dapo"].objective.clip_high == 0.28
    )
    assert rl_by_preset["dapo"].shaping.overlong_penalty == 0.5
    with pytest.raises(
        ConfigError, match="preset 'ppo': choose one of screened, compass_max, espo"
    ):
        config_from(folder, method="ppo")


def test_conversations_make_an_sft_run(folder):
    config = sft_config(str(folder / "model"), [str(folder / "chats.jsonl")])
    config.validate()
    assert config.sft.files == (str(folder / "chats.jsonl"),)
    assert config.sft.buckets[-1] <= 48 and config.sft.batch == 20


BAD = {
    "no model": (["--model", "nowhere", "--data", "p"], "--model nowhere: there is no such folder"),
    "no data": (["--model", "model"], "--data FILE is missing"),
    "both": (["x.py", "--model", "model", "--data", "prompts.jsonl"], "give one of the two"),
    "reward of a CONFIG": (
        ["x.py", "--reward", "my_reward.py:score"],
        "would change nothing in CONFIG x.py: set --data.sources.0.verifier NAME",
    ),
    "data of a CONFIG": (["x.py", "--data", "prompts.jsonl"], "--data is for --model"),
    "preset": (["tiny_reasoning_cpu", "--preset", "ppo"], "preset 'ppo': choose one of screened"),
    "no tokenizer": (["--model", ".", "--data", "prompts.jsonl"], "no tokenizer.json is there"),
    "template arguments": (
        ["--model", "model", "--data", "prompts.jsonl", "--data.template-args", "5"],
        "data.template_args = 5: the wrong type",
    ),
    "buckets": (
        ["--model", "model", "--data", "prompts.jsonl", "--sft.buckets", "9", "3"],
        "sft.buckets = (9, 3): must increase",
    ),
    "longest answer": (
        ["--model", "model", "--data", "prompts.jsonl", "--rollout.max-new-tokens", "9" * 5],
        "must be below model.max_positions = 160",
    ),
    "answer beyond the context": (
        ["--model", "model", "--data", "prompts.jsonl", "--rollout.max-new-tokens", "160"],
        "must be below model.max_positions = 160",
    ),
    "weight": (
        ["--model", "model", "--data", "prompts.jsonl", "--reward", "math=much"],
        "--reward math=much: much is no number",
    ),
    "weight twice": (
        ["--model", "model", "--data", "prompts.jsonl", "--reward", "math=1", "math=0.5"],
        "--reward math=0.5: math is named twice; give one weight for it",
    ),
    "reward twice": (
        ["--model", "model", "--data", "prompts.jsonl", "--reward", "math", "--reward=format"],
        "--reward is given 2 times, and the last would replace the others; give all its values",
    ),
}


@pytest.mark.parametrize("bad", list(BAD))
def test_what_cannot_be_used_is_one_line(folder, monkeypatch, capsys, bad):
    monkeypatch.chdir(folder)
    words, message = BAD[bad]
    assert main(["train", *words]) == 2
    error = capsys.readouterr().err
    assert message in error and len(error.splitlines()) == 1


@pytest.mark.slow
def test_one_command_trains(folder, monkeypatch):
    monkeypatch.chdir(folder)
    words = [f"--{name}={value}" for name, value in FAST.items() if name != "rl.buckets"]
    files = ["--model", "model", "--data", "prompts.jsonl", "--reward", "my_reward.py:score"]
    assert main(["train", *files, *words, "--rl.buckets", "64", "--mesh.fsdp", "1"]) == 0
    config = read_config("runs/model-prompts/rl")
    assert config.data.sources[0].verifier == str(folder / "my_reward.py:score")
    assert len(lines(folder / "runs/model-prompts/rl")) == 1


def test_a_file_is_written_that_makes_the_same_run(folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    files = ["--model", "model", "--data", "prompts.jsonl", "--reward", "math=1", "format=0.2"]
    assert main(["init", "mine.py", *files, "--preset", "dapo"]) == 0
    reward = {"math": 1.0, "format": 0.2}
    expected = rl_config("model", ["prompts.jsonl"], reward, method="dapo")
    assert load_config("mine.py") == expected
    text = (folder / "mine.py").read_text()
    assert "# Number of updates into which the groups of a rollout are split.\n" in text
    assert "top_k" not in text.split("rollout=")[1]  # a default
    assert main(["init", "mine.py", *files]) == 2
    assert "mine.py is there already" in capsys.readouterr().err
    assert main(["init", "mine.txt", *files]) == 2


def test_a_yaml_may_name_a_folder_as_its_model(folder, monkeypatch):
    monkeypatch.chdir(folder)
    (folder / "run.yaml").write_text(
        "name: mine\nmodel: model\ndata: {sources: [{path: prompts.jsonl}]}\n"
    )
    config = load_config("run.yaml")
    assert config.model == rl_config("model", ["prompts.jsonl"]).model
    assert (config.init_from, config.data.tokenizer) == ("model", "model")
    (folder / "run.yaml").write_text(
        f"name: mine\nmodel: model\ninit_from: other\ndata: {{tokenizer: {TOKENIZER}}}\n"
    )
    config = load_config("run.yaml")
    assert (config.init_from, config.data.tokenizer) == ("other", str(TOKENIZER))
    (folder / "run.yaml").write_text("name: mine\nmodel: Qwen/Qwen3-0.6B\n")
    with pytest.raises(
        ConfigError, match=r"^run.yaml: model = Qwen/.*no such folder; .*hf download"
    ):
        load_config("run.yaml")


def test_what_a_class_and_its_base_say_of_their_fields_is_found():
    docs = field_docs(RunConfig)
    assert docs["mesh"] == "Mesh of the training: devices along each axis."
    assert docs["init_from"].endswith("folder or checkpoint; empty: random weights.")
    assert docs["rollout_apart"].endswith("with rl.one_step_off both run at once.")  # on two lines
    assert set(docs) == {field.name for field in dataclasses.fields(RunConfig)}
    assert {"kl_coef", "alpha"} <= set(field_docs(Espo))


def test_one_call_trains_with_a_function(folder, monkeypatch):
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    import my_reward

    settings = {**FAST, "mesh.fsdp": 1}
    out = compass_jax.train(
        "model", "prompts.jsonl", my_reward.score, run_dir="called", settings=settings
    )
    assert out["steps"] == 1 and "reward/mean" in out
    assert read_config("called").data.sources[0].verifier == "my_reward:score"
    with pytest.raises(ConfigError, match=r"rl\.step: no such setting; did you mean rl\.steps"):
        apply(read_config("called"), {"rl.step": 3})


def test_a_setting_of_a_call_has_its_name_on_the_command_line(folder):
    config = config_from(folder)
    settings = {
        "rl.objective.clip-high": 0.3,
        "rl.objective": "dapo",
        "rl.advantage": "rloo",
        "rl.drafts": "none",
        "rollout.max-new-tokens": 40,
        "data.sources.0.repeat": 2,
        "data.sources.0.prompt-field": "prompt",
    }
    words = [x for name, value in settings.items() for x in (f"--{name}", str(value))]
    changed = apply(config, settings)
    assert changed == override(config, words)
    assert changed.rl.shaping.overlong_buffer_tokens == 8
    assert changed.data.sources[0].repeat == 2
    for name in ("data.sources.1.repeat", "data.sources.first.repeat"):
        with pytest.raises(ConfigError, match=f"{name}: no such setting"):
            apply(config, {name: 2})
    with pytest.raises(ConfigError, match=r"rl\.objective\.name = 'ppo': no such objective"):
        apply(config, {"rl.objective": "ppo"})


def test_a_call_measures_the_prompts_with_the_settings_of_the_data(folder, monkeypatch):
    configs = []

    def steps_of(config):
        configs.append(config)
        yield from ()
        return {"stopped": True}

    monkeypatch.setattr(library, "rl_steps", steps_of)
    monkeypatch.setattr(library, "keep_programs", lambda: None)
    for settings in ({}, {"data.system-prompt": "xyz" * 15, "rollout.max-new-tokens": 24}):
        arguments = str(folder / "model"), str(folder / "prompts.jsonl")
        compass_jax.train(*arguments, run_dir=str(folder / "none"), settings=settings)
    usual, longer = configs
    assert longer.rollout.prompt_buckets[-1] >= usual.rollout.prompt_buckets[-1] + 32
    assert longer.rl.buckets[-1] == longer.rollout.prompt_buckets[-1] + 24


def test_a_function_has_the_name_by_which_workers_get_it(folder, monkeypatch):
    monkeypatch.syspath_prepend(str(folder))
    import my_reward

    assert library.reward_name(my_reward.score, "runs/x") == ("my_reward:score", "")

    def score(response):
        return 1.0

    name, source = library.reward_name(score, "runs/x")
    assert name == "runs/x/reward.py:score" and source.startswith("def score(response):")
    with pytest.raises(ConfigError, match="a lambda cannot be written into a file"):
        library.reward_name(lambda prompt, response: 1.0, "runs/x")


@pytest.mark.parametrize("has_file", [True, False])
def test_a_script_s_function_that_cannot_be_copied_is_imported_from_the_script(
    monkeypatch, tmp_path, has_file
):
    main_module = types.ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", main_module)
    script = tmp_path / "script.py"
    script.write_text("STATE = object()\ndef score(response):\n    return STATE\n")
    exec(compile(script.read_text(), str(script), "exec"), vars(main_module))
    if has_file:
        main_module.__file__ = str(script)
        assert library.reward_name(main_module.score, "runs/x") == (f"{script}:score", "")
    else:
        with pytest.raises(ConfigError, match="uses STATE: a object cannot be written as source"):
            library.reward_name(main_module.score, "runs/x")


def test_the_package_is_imported_in_an_instant():
    import subprocess

    script = (
        "import sys, compass_jax; assert 'jax' not in sys.modules and 'numpy' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_a_rollout_on_its_own_devices_has_their_memory_for_its_caches(monkeypatch):
    """Weights, moments and gradients of the training take 20 bytes a parameter."""
    config = tiny_run()
    parameters = param_count(config.model)
    monkeypatch.setattr(from_files, "usable_bytes", lambda: 100 * parameters)
    monkeypatch.setattr(from_files, "process_bytes", lambda: 0)
    shared, apart = (
        from_files._free_bytes(config.model, config.compute, mesh) for mesh in (MeshConfig(), None)
    )
    assert (shared, apart) == (76 * parameters, 96 * parameters)


def test_an_axis_of_the_rollout_s_mesh_can_be_set_where_there_is_none():
    settings = {"rollout_mesh.replica": 4, "rollout_apart": True}
    config = apply(tiny_run(), settings)
    assert config.rollout_mesh == MeshConfig(replica=4) and config.rollout_apart
    words = ["--rollout-mesh.replica", "4", "--rollout_mesh.expert=2"]
    assert override(tiny_run(), words).rollout_mesh == MeshConfig(replica=4, expert=2)


def rows_of(folder, name, rows):
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder / name)


LONG = "Tom has 31 apples, 7 pears and 254 plums. " * 2


@pytest.mark.parametrize(
    ("row", "longer", "column"),
    [
        (("2?", "1"), 0, ""),
        ((LONG, "1"), 0, "prompt"),
        (("2?", LONG), 0, "answer"),
        ((LONG, "1"), 1, "prompt"),  # one of 40 is longer than the others
        ((LONG * 9, "1"), 0, ""),
        ((LONG, None), 0, ""),  # nothing to measure
    ],
)
def test_the_longest_answer_on_a_cpu_follows_questions_and_references(
    folder, tmp_path, row, longer, column, monkeypatch
):
    model = dataclasses.replace(from_files.model_of(str(folder / "model")), max_positions=2048)
    monkeypatch.setattr(from_files, "model_of", lambda path: model)
    keys = ("prompt", "tests" if row[1] is None else "answer")
    rows = [dict(zip(keys, (f"{row[0]} {n}", row[1] or ["assert f(1)"]))) for n in range(10, 50)]
    for one in rows[:longer]:
        one["prompt"] *= 4
    data = rows_of(tmp_path, "rows.jsonl", rows)
    config = config_from(folder, data=[data], reward="code" if row[1] is None else "exact")
    tokens, bucket = config.rollout.max_new_tokens, config.rollout.cache_bucket
    if column:
        tokenizer = Tokenizer.for_model(config.data.tokenizer, config.model.vocab_size)
        usual = 2 * len(tokenizer.ids(rows[-1][column]))
        assert 96 < usual < 240 and usual - bucket < tokens < usual + 16
    else:
        limit = 64 if row[0] == "2?" else 256
        assert limit - bucket < tokens <= limit
    assert bool(from_files.describe_answer(config.rollout, config.model, ())) == (tokens < 256)
    assert from_files.describe_answer(config.rollout, config.model, {from_files.ANSWER}) == ""


@pytest.mark.parametrize(("rank", "rate"), [(0, 1.5e-4), (4, 1.5e-3)])
def test_the_rate_follows_the_size_of_the_model_and_what_is_trained(folder, rank, rate):
    config = config_from(folder, settings={"lora.rank": rank})
    assert config.rl.optim.learning_rate == rate
    large = config_from(folder, settings={"rl.optim.learning_rate": 3e-4})
    assert large.rl.optim.learning_rate == 3e-4
