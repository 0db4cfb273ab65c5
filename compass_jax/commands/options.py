"""The options of each command: a frozen dataclass whose fields tyro reads from the command line.

The sentence after a field is its help text. `commands/table.py` names the class and the function of
each command.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from tyro.conf import (
    FlagConversionOff,
    OmitArgPrefixes,
    Positional,
    UseAppendAction,
    arg,
    create_mutex_group,
)

from compass_jax.config.distil import DistilConfig
from compass_jax.config.prepare import PrepareConfig
from compass_jax.config.ranges import Count, CountOrOff

Folder = Annotated[str, arg(metavar="DIR")]
File = Annotated[str, arg(metavar="FILE")]
Files = Annotated[tuple[str, ...], arg(metavar="FILE [FILE ...]")]
Named = Annotated[str, arg(metavar="NAME")]
Address = Annotated[str, arg(metavar="URL")]
Family = Annotated[str | None, arg(metavar="FILE.py:FAMILY")]
DType = Literal["float32", "bfloat16"]
Choice = Annotated[bool, create_mutex_group(required=False, title="which answers")]


@dataclass(frozen=True, kw_only=True)
class Compiling:
    """Options of a command that compiles programs."""

    compilation_cache: Folder = ""
    """Folder of compiled programs, kept for later starts; off: compile at every start (default:
    ~/.cache/compass_jax/programs, at most 4 GiB).
    """


@dataclass(frozen=True, kw_only=True)
class Configured:
    """Options of a command with a configuration; every other option is a setting of it."""

    config: Annotated[Positional[str], arg(metavar="CONFIG")] = ""
    """Configuration file: a path or a name such as tiny_reasoning_cpu. Settings such as --rl.steps
    3 follow it; with CONFIG, --help lists them all.
    """
    dry_run: bool = False
    """Check everything that the command opens, print the settings that differ from the defaults and
    the work that it would do, and end.
    """
    json: bool = False
    """With --dry-run, check the configuration alone and print it as JSON."""


@dataclass(frozen=True, kw_only=True)
class FromModel:
    """A model and files of data instead of a configuration."""

    model: Annotated[str, arg(metavar="FOLDER")] = ""
    """Model and tokenizer: a Hugging Face folder or run directory, instead of CONFIG."""
    data: Files = ()
    """Training data, with --model: files or folders of rows (docs/data.md), or tasks such as
    my_tasks.py:task.
    """


@dataclass(frozen=True, kw_only=True)
class FromPreferences(FromModel):
    """A model and files of preferences."""

    eval: File = ""
    """Evaluation data, with --model; without it a part of --data is held out."""
    preset: Named = ""
    """Method whose settings are used: screened (GRPO that spends few samples on prompts which teach
    nothing; the default), compass_max (the system of arXiv 2512.07710), or as published espo, gspo,
    grpo or dapo. With CONFIG it replaces the file's method (docs/howto/presets.md).
    """


@dataclass(frozen=True, kw_only=True)
class FromPrompts(FromPreferences):
    """A model, files of prompts and a reward."""

    env: Annotated[tuple[str, ...], arg(metavar="NAME [NAME ...]")] = ()
    """Environment whose episodes are trained on, with --model, instead of or beside --data: the
    class my_env.py:Game (docs/howto/environments.md).
    """
    reward: Annotated[tuple[str, ...], arg(metavar="NAME [NAME ...]")] = ("math",)
    """Verifier that scores answers, with --model: math, exact, ..., file.py:function or
    module:function; several as NAME=WEIGHT.
    """


@dataclass(frozen=True, kw_only=True)
class OfCheckpoint(Configured, Compiling):
    """A configured command that reads a checkpoint."""

    checkpoint: Folder = ""
    """Weights: a run directory or one checkpoint."""
    out: Folder = ""
    """Folder for the results."""


@dataclass(frozen=True, kw_only=True)
class Stepwise:
    """Options of a command that trains in steps."""

    lost_log: bool = False
    """Resume although metrics.jsonl or rollouts.jsonl lack lines that the checkpoint counts."""
    profile_steps: Annotated[tuple[int, ...], arg(metavar="FIRST LAST")] = ()
    """First and last step of a trace by JAX's profiler, in the folder profile of the run's
    directory.
    """


@dataclass(frozen=True, kw_only=True)
class Sft(Configured, FromModel, Compiling, Stepwise):
    """Options of `compass sft`."""


@dataclass(frozen=True, kw_only=True)
class Train(Configured, FromPrompts, Compiling, Stepwise):
    """Options of `compass train`."""

    strict: bool = False
    """Save everything and end with exit status 3 if no response of the first rollout or of an
    evaluation has an answer, or all are wrong.
    """


@dataclass(frozen=True, kw_only=True)
class TrainJudge(Configured, FromPreferences, Compiling):
    """Options of `compass train-judge`."""

    scalar: bool = False
    """Train a scalar reward model instead, by the sft settings alone."""


@dataclass(frozen=True, kw_only=True)
class Data(Configured, FromPrompts):
    """Options of `compass data`."""

    most: CountOrOff = 2
    """Number of prompts that are shown whole."""
    predict: str = ""
    """Show instead the prompts by the pass rates that rl.predictor predicts from these outcomes:
    pass_rates.jsonl of compass filter, or the directory of a run.
    """


@dataclass(frozen=True, kw_only=True)
class Eval(OfCheckpoint):
    """Options of `compass eval`."""

    env: Annotated[tuple[str, ...], arg(metavar="NAME [NAME ...]")] = ()
    """Environment whose rows are evaluated, with --checkpoint, instead of CONFIG: the class
    my_env.py:Game. --checkpoint may be a Hugging Face folder then.
    """
    json: bool = False
    """Print summary.json alone on stdout; with --dry-run, the configuration."""
    strict: bool = False
    """End with exit status 3 if no response has an answer, or all are wrong."""
    follow: bool = False
    """Evaluate each checkpoint of a run in training until its last step, each into a folder of
    --out.
    """


@dataclass(frozen=True, kw_only=True)
class Filter(OfCheckpoint):
    """Options of `compass filter`."""

    samples: int = 8
    """Number of sampled answers per prompt."""
    low: float = 0.0
    """Lower bound of the pass rate; prompts above it are kept."""
    high: float = 1.0
    """Upper bound of the pass rate; prompts below it are kept."""


@dataclass(frozen=True, kw_only=True)
class Plan(Configured):
    """Options of `compass plan`."""

    json: bool = False
    """End with one line of JSON on stdout, everything else on stderr; with --dry-run, print the
    configuration.
    """
    topology: Named = ""
    """TPUs to plan for: v5p:4x4x4, v6e:16x16, tpu7x:4x4x4, ..."""
    samplers: int = 0
    """Plan one of this number of samplers (samplers.address), on --topology; 0: the training."""
    answer_tokens: int = 0
    """Mean number of tokens of an answer, for one more estimate of a step's time."""
    search: int = 0
    """Number of other layouts of the training that are tried, the likeliest first."""
    any_versions: bool = False
    """Accept older versions of jax and libtpu, which train experts slowly."""


@dataclass(frozen=True, kw_only=True)
class Demo(Compiling):
    """Options of `compass demo`."""

    out: Folder = "runs/demo"
    """Folder for the results."""
    seed: int = 0
    """Seed of every random draw (a number)."""
    quick: bool = False
    """Run every stage for a few minutes only; the model learns little."""


@dataclass(frozen=True, kw_only=True)
class ImportHf:
    """Options of `compass import-hf`."""

    src: Positional[Folder]
    """Hugging Face folder with config.json and safetensors."""
    out: Positional[Folder]
    """Run directory for the checkpoint."""
    family: Family = None
    """Your own family that reads the folder (default: by its model_type)."""


@dataclass(frozen=True, kw_only=True)
class ImportGguf:
    """Options of `compass import-gguf`."""

    src: Annotated[Positional[str], arg(metavar="FILE")]
    """GGUF file of llama.cpp, with its tokenizer."""
    out: Positional[Folder]
    """New Hugging Face folder."""
    dtype: DType = "float32"
    """Type of the stored weights; float32 holds every quantised value exactly."""


@dataclass(frozen=True, kw_only=True)
class Upcycle:
    """Options of `compass upcycle`."""

    src: Positional[Folder]
    """Hugging Face folder of a dense model (Llama, Mistral or Qwen3)."""
    out: Positional[Folder]
    """New Hugging Face folder."""
    experts: int = 8
    """Number of experts of a layer, each a copy of the layer's MLP."""
    top_k: int = 2
    """Number of experts of a token."""
    noise: float = 0.0
    """Standard deviation of the noise in each expert's matrices, in standard deviations of the
    matrix.
    """
    seed: int = 0
    """Seed of the random router and of the noise (a number)."""


@dataclass(frozen=True, kw_only=True)
class ExportHf:
    """Options of `compass export-hf`."""

    checkpoint: Positional[Folder]
    """Weights: a run directory or one checkpoint."""
    out: Positional[Folder]
    """New folder for the weights, which transformers reads."""
    adapter: bool = False
    """Write the LoRA adapter alone, as a folder of PEFT, instead of the merged model."""


@dataclass(frozen=True, kw_only=True)
class Check:
    """Options of `compass check`."""

    path: Positional[Folder]
    """Run directory, checkpoint or Hugging Face folder to check."""
    family: Family = None
    """Your own family that reads the Hugging Face folder."""
    against: Literal["transformers"] | None = None
    """Compare logits and greedy tokens of the Hugging Face folder with another library's (needs the
    extra 'transformers').
    """


@dataclass(frozen=True, kw_only=True)
class Init(FromPrompts):
    """Options of `compass init`."""

    out: Annotated[Positional[str], arg(metavar="OUT.py")]
    """Configuration file to write."""


@dataclass(frozen=True, kw_only=True)
class Tasks:
    """Options of `compass tasks`."""

    task: Annotated[Positional[str], arg(metavar="NAME")] = ""
    """Verifier, task or data set to describe; reasoning_gym: a row of each of its data sets."""


@dataclass(frozen=True, kw_only=True)
class Try:
    """Options of `compass try`."""

    task: Annotated[Positional[str], arg(metavar="TASK")]
    """Verifier: its name, a reasoning-gym data set, file.py:task, file.py:function or
    module:name; or an environment, file.py:Game, of which --model plays an episode.
    """
    response: UseAppendAction[Annotated[tuple[str, ...], arg(metavar="TEXT")]] = ()
    """The model's answer, once for each turn of a conversation; - reads standard input."""
    row: Annotated[str, arg(metavar="JSON")] = ""
    """Row of the prompt, a JSON object of columns (default: an example row)."""
    options: Annotated[str, arg(metavar="JSON")] = ""
    """Arguments of the verifier, data set or environment, a JSON object: the verifier_args or
    options of a source.
    """
    number: CountOrOff = 0
    """Number of the task's row, from 0, if --row is absent."""
    seed: int = 0
    """Seed of the task's rows (a number)."""
    answer_tag: Annotated[str, arg(metavar="TAG")] = "answer"
    """Tag of the answer: the text in the last <TAG>...</TAG>; empty: the whole response."""
    chat_format: Annotated[str, arg(metavar="NAME")] = "any"
    """Form of the answer, as data.chat_format: any, hermes, gpt_oss, ..., file.py:FORMAT, or
    <plan>...</plan>.
    """
    timeout_s: float = 5.0
    """Time limit of the verifier in seconds."""
    sandbox: Literal["auto", "required", "off"] = "auto"
    """Guards of the verifier: those that this machine has, all of them or an error, or no guard."""
    endpoint: Address = ""
    """Address of the judge's OpenAI API, such as http://127.0.0.1:8000/v1."""
    model: Named = ""
    """Name of the judge at the endpoint; for an environment a model's folder or a run directory."""
    key_env: Named = ""
    """Environment variable that holds the endpoint's key; empty: send no key."""


@dataclass(frozen=True, kw_only=True)
class EvalJudge(Compiling):
    """Options of `compass eval-judge`."""

    data: Positional[Files]
    """Files of pairs: candidate, anchor and verdict, or chosen and rejected."""
    endpoint: Address = ""
    """Address of the judge's OpenAI API, such as http://127.0.0.1:8000/v1; empty: our own engine
    runs the judge.
    """
    model: Named
    """Name of the judge at the endpoint; without --endpoint a run directory, checkpoint or Hugging
    Face folder.
    """
    key_env: Named = ""
    """Environment variable that holds the endpoint's key; empty: send no key."""
    max_tokens: int | None = None
    """Maximum number of tokens of a judge's answer (default: 2048 at an endpoint, where 0 is its
    own limit; else as memory allows).
    """
    requests: int = 16
    """Maximum number of concurrent requests (a count)."""
    timeout_s: float = 120.0
    """Time limit of a verdict in seconds, for each order, retries included."""
    most: CountOrOff = 0
    """Number of pairs to judge, from the first; 0: all."""
    out: Folder = ""
    """New folder for the shares and one line per pair."""


@dataclass(frozen=True, kw_only=True)
class Show:
    """Options of `compass show`."""

    run: Positional[Folder]
    """Directory of an RL run, or folder of an evaluation."""
    step: int | None = None
    """Number of the step whose samples are shown (default: the last one)."""
    best: Choice = False
    """Show the best answers."""
    worst: Choice = False
    """Show the worst answers."""
    truncated: Choice = False
    """Show answers that were cut at the length limit."""
    varied: Choice = False
    """Show the best and the worst answer of the groups whose rewards vary most."""
    label: Annotated[str | None, arg(metavar="NAME")] = None
    """Show the samples of this data source or task only."""
    most: Count = 4
    """Number of groups to show (a count)."""

    @property
    def choice(self) -> str | None:
        """The chosen order of answers; None: all answers in logged order."""
        names = ("best", "worst", "truncated", "varied")
        return next((name for name in names if getattr(self, name)), None)


@dataclass(frozen=True, kw_only=True)
class Report:
    """Options of `compass report`."""

    run: Annotated[Positional[tuple[str, ...]], arg(metavar="RUN [RUN ...]")]
    """Run directories to report on and compare."""
    out: Annotated[str, arg(metavar="FILE.html")] = ""
    """Page to write (default: in the first run's directory)."""
    watch: bool = False
    """Write the page again while a run continues; end with the run."""


@dataclass(frozen=True, kw_only=True)
class Compare:
    """Options of `compass compare`."""

    first: Annotated[Positional[str], arg(metavar="RUN")]
    """First evaluation: a folder of compass eval --out, or the directory of a finished run."""
    second: Annotated[Positional[str], arg(metavar="RUN")]
    """Second evaluation; differences are second minus first."""
    json: bool = False
    """Print the comparison as JSON instead of tables."""


@dataclass(frozen=True, kw_only=True)
class Distil(Compiling):
    """Options of `compass distil`."""

    out: Folder
    """Folder for train.jsonl, answers.jsonl and report.json."""
    settings: OmitArgPrefixes[FlagConversionOff[DistilConfig]]
    """Settings of the distillation."""


@dataclass(frozen=True, kw_only=True)
class PrepareSft:
    """Options of `compass prepare-sft`."""

    out: Folder
    """Folder for train.jsonl, report.json and report.md."""
    settings: OmitArgPrefixes[FlagConversionOff[PrepareConfig]]
    """Settings of the filters."""


@dataclass(frozen=True, kw_only=True)
class MergeLora:
    """Options of `compass merge-lora`."""

    base: Positional[Folder]
    """Hugging Face folder that the adapters were trained on."""
    out: Positional[Folder]
    """New Hugging Face folder."""
    adapters: Annotated[tuple[str, ...], arg(metavar="DIR [DIR ...]")]
    """LoRA adapters: folders of PEFT, such as export-hf --adapter writes."""
    weights: Annotated[tuple[float, ...], arg(metavar="FLOAT [FLOAT ...]")] = ()
    """Factor of each adapter (default: 1)."""


@dataclass(frozen=True, kw_only=True)
class Merge(Compiling):
    """Options of `compass merge`."""

    base: Folder
    """Base model of all --models: a Hugging Face folder, run directory or checkpoint; config.json
    and the tokenizer come from it.
    """
    models: Annotated[tuple[str, ...], arg(metavar="DIR [DIR ...]")]
    """Models to merge: Hugging Face folders, run directories or checkpoints."""
    out: Folder
    """New folder for the merged model, or for the sweep."""
    method: Named = "ties"
    """Method: ties or linear."""
    weights: Annotated[tuple[float, ...] | None, arg(metavar="FLOAT [FLOAT ...]")] = None
    """Factor of each model (default: 1)."""
    density: Annotated[tuple[float, ...] | None, arg(metavar="FLOAT [FLOAT ...]")] = None
    """Share of each model's changes that ties keeps, one for all or one for each (default:
    0.2).
    """
    scale: float = 1.0
    """Factor of the merged change; 0 gives the base."""
    routers: Annotated[str, arg(metavar="WHICH")] = "merge"
    """Gates of MoE layers: merge, base, or the number of the model to take them from."""
    shard_gib: float | None = None
    """Maximum size of a file of weights in GiB (default: files as in the base)."""
    family: Family = None
    """Your own family that reads the models (default: by their model_type)."""
    sweep: Annotated[tuple[float, ...] | None, arg(metavar="FLOAT [FLOAT ...]")] = None
    """Weights of the first of two models (shares of 1), each merged and evaluated; the same command
    resumes an interrupted sweep.
    """
    evaluate: Annotated[str | None, arg(metavar="CONFIG")] = None
    """Configuration that evaluates the merged models of a sweep."""
    keep: bool = False
    """Keep the merged folders of a sweep."""


@dataclass(frozen=True, kw_only=True)
class Pipeline(Compiling):
    """Options of `compass pipeline`."""

    config: Annotated[Positional[str], arg(metavar="CONFIG")]
    """File whose public function returns a Pipeline: a path, or a name such as
    compass_max_tiny_cpu.
    """
    out: Folder = ""
    """Folder for the stages (default: the configuration's own)."""
    redo: UseAppendAction[Annotated[tuple[str, ...], arg(metavar="STAGE")]] = ()
    """Stage to run again together with the stages that depend on it; their folders are renamed.
    Repeatable.
    """
    dry_run: bool = False
    """Check everything, print the inputs and outputs of each stage, and end."""
    status: bool = False
    """Print the progress of each stage and the results so far, and end."""


@dataclass(frozen=True)
class Sample(Compiling):
    """Options of `compass sample`."""

    address: Annotated[Positional[str], arg(metavar="ADDRESS")]
    """Address host:port of the training: samplers.address of its configuration."""
    patience_s: float = 600.0
    """Seconds without the training after which this sampler ends with an error."""


@dataclass(frozen=True)
class Serve(Compiling):
    """Options of `compass serve`."""

    weights: Annotated[Positional[str], arg(metavar="WEIGHTS")]
    """Weights: a run directory, checkpoint or Hugging Face folder."""
    host: Named = "127.0.0.1"
    """Network interface of the server; 0.0.0.0: every interface."""
    port: int = 9000
    """Port number; 0, without --jetstream: any free port."""
    slots: int = 16
    """Number of requests decoded together (slots)."""
    prompt_tokens: int | None = None
    """Maximum number of prompt tokens, a power of two (default: as many as fit, with an answer,
    into the model's context and the free memory).
    """
    max_new_tokens: int | None = None
    """Maximum number of new tokens of an answer (default: 256, or half of a shorter context)."""
    temperature: float = 1.0
    """Sampling temperature of --jetstream's requests (a factor); 0 is greedy."""
    cache_pages: int = 0
    """Number of cache pages that the slots share; 0: each slot has room for the longest sequence.
    """
    page_tokens: int = 16
    """Number of tokens of a cache page."""
    dtype: DType = "float32"
    """Type of weights and activations."""
    quantize: Literal["off", "e4m3", "int8", "auto"] = "off"
    """8-bit weights, cast to `dtype` for each product; auto: the type of the chip's units."""
    kv_quantize: Literal["off", "e4m3", "int8"] = "off"
    """8-bit keys and values in the cache."""
    mesh: Annotated[str, arg(metavar="AXES")] = ""
    """Mesh of devices, such as expert=4,tensor=2 (default: one device)."""
    jetstream: bool = False
    """Serve JetStream's gRPC protocol, which needs google-jetstream, instead of HTTP for OpenAI's
    clients; no option below acts with it.
    """
    openai: bool = False
    """HTTP for OpenAI's clients, which is the default: older commands have this option."""
    max_waiting: int = 64
    """Maximum number of queued requests (a count)."""
    max_connections: int = 512
    """Maximum number of open connections (a count)."""
    api_key: Annotated[str | None, arg(metavar="KEY")] = field(default=None, repr=False)
    """Key that clients must send; required if other machines reach the host. The variable
    COMPASS_API_KEY sets it out of sight of the process list.
    """
    allow_host: UseAppendAction[Annotated[tuple[str, ...], arg(metavar="NAME")]] = ()
    """Host name of this server beside localhost and its address. Repeatable."""
    chat_format: Annotated[str, arg(metavar="NAME")] = "auto"
    """Form of the answers (data.chat_format): auto, by the chat template; a name, any, your own as
    file.py:FORMAT, or marks of thoughts as <plan>...</plan>.
    """
    trust_prompts: bool = False
    """Read special tokens in prompts of /v1/completions as control tokens; otherwise they are text,
    as always in chat messages.
    """
    tinker: bool = False
    """Serve the Tinker API, which trains and samples, to the client of the package tinker; needs
    the extra tinker (docs/tinker.md).
    """
    states: Folder = "tinker_states"
    """Folder of the states that clients of --tinker save."""
    routes_gib: float = 0.25
    """Size of the buffer with the routes of samples, with --tinker (GiB)."""
    max_models: int = 4
    """Maximum number of models that clients of --tinker train at a time (a count)."""
    max_sessions: int = 64
    """Maximum number of sessions of clients of --tinker (a count)."""
    weight_copies: int = 2
    """Number of copies of weights that --tinker keeps for sampling clients; the newest stay."""
    micro_batch_tokens: int = 16_384
    """Maximum number of tokens of a micro-batch of --tinker, padding included."""
