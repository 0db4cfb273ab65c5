"""The table of the metrics: one sentence and a unit for every name that a run logs, and the panels
in which the report's page draws them.

A part in angle brackets stands for a name from the run: a task's label, a component of a verifier.
"""

from __future__ import annotations

import re
from typing import NamedTuple


class Metric(NamedTuple):
    """The unit of a metric (empty for a number without one) and its description."""

    unit: str
    text: str


class Line(NamedTuple):
    """A line of a panel. `colour`: one of runs/report/web/page.css, such as blue."""

    metric: str
    label: str
    colour: str


class Panel(NamedTuple):
    """One chart.

    `scale`: linear; log; share (a part of 1); stacked (shares that sum to 1); time (cut if a few
    values are far above all others).
    """

    title: str
    unit: str
    scale: str
    lines: tuple[Line, ...]


# `# section of the page`; `title | unit | scale` of a panel; `metric | label | colour` of its lines
PANEL_TABLE = """
# curves
Reward | mean of known raw rewards | linear
    reward/mean | reward | blue
    reward/gold/mean | gold label | orange
Reward up, gold down | p-value of the guard's test | log
    guard/parting_p | p | red
Groups by reward | share of groups | share
    groups/varied_frac | varied | blue
    groups/all_right_frac | all right | green
    groups/all_wrong_frac | all wrong | red
    groups/between_frac | between | orange
What the tokens taught | share of generated tokens | stacked
    waste/frac_verifier_signal | verifier | blue
    waste/frac_shaping_signal | shaping | sky
    waste/frac_entropy_signal | entropy (RL-ZVP) | green
    waste/frac_prediction_signal | prediction | purple
    waste/frac_none | none | grey
Predicted pass rates | share in the 90% interval; mean error; share of groups | share
    posterior/coverage_90 | in the interval | blue
    posterior/abs_error | error | orange
    posterior/hopeless_frac | hopeless | grey
Measured where predicted | share of right answers | share
    posterior/measured_0 | 0 to 20% | red
    posterior/measured_20 | 20 to 40% | orange
    posterior/measured_40 | 40 to 60% | green
    posterior/measured_60 | 60 to 80% | sky
    posterior/measured_80 | 80 to 100% | blue
Entropy of the policy | nats per token | linear
    entropy_nats | entropy | orange
    entropy/right | right answers | green
    entropy/wrong | wrong answers | red
Response length | tokens | linear
    response_length/mean | mean | blue
    response_length/max | longest | sky
Truncated and repeated | share | share
    truncated_frac | responses truncated | red
    repetition_frac | n-grams repeated | purple
    episode/truncated_frac | episodes cut | orange
Clipped tokens | share of tokens | share
    policy/clip_frac | clipped | red
KL to the old policy | k3, nats per token | log
    policy/kl_k3 | kl | purple
Gradient norm | before clipping | log
    grad_norm | norm | green
Loss | nats per token | linear
    sft/loss | SFT loss | blue
Learning rate | per update | linear
    lr | lr | grey
Time of a step | seconds | time
    time/rollout_s | rollout | blue
    time/score_s | old log-probs | sky
    time/update_s | updates | orange
    time/step_s | whole step | grey
Speed | tokens per second | linear
    rollout/tokens_per_s | rollout | blue
    train/tokens_per_s | training | orange
Turns of an episode | mean | linear
    episode/turns | turns | blue
    episode/branches | branches | orange
Time of an episode | seconds | time
    time/episode_model_s | model | blue
    time/episode_environment_s | environment | orange
# mismatch
Log-prob difference | |training - rollout|, nats | log
    mismatch/logp_abs_diff | difference | red
KL of rollout and training | k3, nats per token | log
    mismatch/kl_k3 | kl | orange
Effective sample size | share of the samples | share
    mismatch/ess | ess | blue
Tokens far apart | share of tokens | share
    mismatch/extreme_frac | extreme | red
Samples of earlier steps | log-prob difference, nats; they are of older weights | log
    mismatch/earlier/logp_abs_diff | difference | grey
Router replay | share of routed tokens | share
    replay/flip_frac | live routing differs | purple
    replay/unset_frac | without a route | grey
Load of the fullest expert | over the mean | linear
    moe/load_max_over_mean | load | green
Staleness | updates since a token was sampled | linear
    staleness | mean | blue
    staleness_max | most | sky
Correction | mean weight and share dropped | linear
    correction/weight_mean | weight | blue
    correction/dropped_frac | dropped | red
"""

# name [unit]: description
TABLE = """
# rewards and groups
reward/mean: The mean raw reward of the samples whose reward is known.
reward/<part>/mean: The mean of a part that a verifier or the shaping named, over the samples with
    it.
reward/extracted_frac [share]: Responses in which an answer was found, of those that were judged.
reward/unknown_frac [share]: Samples without a reward: a timeout, an error, or a verifier that gave
    none.
reward/timeout_frac [share]: Samples whose verifier exceeded its time limit.
reward/unverified_groups [groups]: Groups in which no sample has a reward; they are not trained on.
reward/gap_violations [groups]: Groups with two rewards closer than rewards.smallest_gap, or without
    it than the penalties' sum (with shaping).
label/<label>/pass_rate [share]: Right responses to a label's prompts in the step, of those whose
    reward is known; logged where the data has 2 to 32 labels.
label/<label>/entropy_nats [nats]: Mean entropy of the tokens of a label's responses, over those
    that the step's passes scored.
label/<label>/length_mean_tokens [tokens]: Mean length of the responses to a label's prompts in the
    step.
groups/between_frac [share]: Groups whose known rewards, two or more, are all equal and neither
    right nor wrong, so that only a prediction gives them an advantage.
groups/undecided_frac [share]: Groups of which fewer than two rewards are known.
groups/<kind>_frac [share]: Groups of a kind: varied, all_right, all_wrong, between, undecided; they
    sum to 1.
zero_variance/rate_all_right [share]: Groups whose answers are all right, of those with two known
    rewards or more.
zero_variance/rate_all_wrong [share]: Groups whose answers are all wrong, of those with two known
    rewards or more.
advantage/inversion_frac [share]: Pairs of a group in which the better answer has the lower
    advantage; by gold labels where a source has them, else by rewards.
advantage/<label>/inversion_frac [share]: Pairs of a label's groups that are inverted, by gold
    labels.
# training signal of the generated tokens
waste/tokens_generated [tokens]: Tokens that the step generated.
waste/frac_verifier_signal [share]: Generated tokens whose advantage comes from rewards that differ.
waste/frac_shaping_signal [share]: Generated tokens whose advantage comes from penalties alone.
waste/frac_entropy_signal [share]: Generated tokens whose advantage is RL-ZVP's, which is much
    smaller.
waste/frac_prediction_signal [share]: Generated tokens whose advantage comes from the predicted pass
    rate alone: of groups with equal rewards, and of single known rewards.
waste/frac_none [share]: Generated tokens without any advantage.
waste/tokens_drafted [tokens]: Tokens that drafts gave (rl.drafts); they were not generated and are
    in no other number of waste/.
waste/filter_tokens [tokens]: Tokens that the offline filter generated before the run, once for all
    steps.
# the stages
zero_variance/skipped_prompts [prompts]: Prompts that the selection skipped.
zero_variance/grown_groups [groups]: Uniform groups that got more samples.
zero_variance/grow_rescued_groups [groups]: Grown groups that vary now.
zero_variance/grow_tokens [tokens]: Tokens of the samples that growth added.
zero_variance/dynamic_rounds [rounds]: Rounds of generation that dynamic sampling, or a step policy
    with several rounds, took.
zero_variance/dynamic_dropped_groups [groups]: Groups that these generated and did not train on.
zero_variance/dynamic_dropped_tokens [tokens]: Tokens of the dropped groups.
zero_variance/dynamic_surplus_groups [groups]: Dropped groups that varied: the step was full
    already.
zero_variance/dynamic_filled_groups [groups]: Uniform groups that filled a step after the last
    round.
screening/stopped_groups [groups]: Groups that screening left at their first samples; in several
    rounds this number and those below include dropped groups.
screening/stopped_frac [share]: Groups that screening left at their first samples, of all.
screening/saved_samples [samples]: Samples that the stopped groups would have got as well.
screening/continued_tokens [tokens]: Tokens of the samples after the first ones.
screening/continued_uniform_groups [groups]: Groups that got all samples although the first ones had
    equal rewards.
screening/rescued_groups [groups]: Groups whose first rewards were equal and that vary now.
earlier/groups [groups]: Groups of earlier steps that the update trained on (a hook of rl.hooks
    holds them), in the places of groups of the step.
earlier/tokens [tokens]: Tokens of these groups, which an earlier step generated and counted.
drafts/used [samples]: Samples that began with a draft (rl.drafts).
drafts/scored_tokens [tokens]: Tokens of these drafts.
drafts/accepted_frac [share]: Accepted tokens of the drafts, of all their tokens; 0 without a draft.
curriculum/stage: The stage of rl.stages in which the step is, from 0.
curriculum/band_<i>_share [share]: Prompts that the step drew from band i of its stage's mix, of all
    that it drew.
curriculum/borrowed_prompts [prompts]: Prompts that took the place of those that their band lacked.
curriculum/<label> [share]: The expected pass rate of a label's prompts.
posterior/coverage_90 [share]: Groups whose number of right answers lies in the 90% interval that
    was predicted for it; a number at its edge counts in part, so that 0.9 is right.
posterior/abs_error: Mean distance of predicted and measured pass rates.
posterior/hopeless_frac [share]: Groups whose pass rate is more likely below 5% than above, by the
    prediction and their own rewards together.
posterior/measured_<percent> [share]: Mean pass rate of the step's groups for which a rate within 20
    points from here was predicted: from 0, 20, 40, 60, 80%.
posterior/<label> [share]: The predicted pass rate of a label's new prompts (rl.predictor label).
# episodes
episode/turns [turns]: Mean number of turns that the model had in an episode, in all its branches.
episode/branches [branches]: Mean number of histories of an episode, of which one is trained on;
    above 1, its harness rewrites its history, or has several agents.
episode/dropped_tokens [tokens]: Mean number of an episode's sampled tokens in other branches than
    the trained one.
episode/truncated_frac [share]: Episodes with a reward that a limit ended: their number of turns,
    their tokens, or the length of a turn.
# the update
loss: Minus the objective, mean over the step's updates.
sft/loss [nats]: Mean negative log-prob of the learnt tokens.
scalar/loss [nats]: Of a scalar reward model: mean negative log-prob of a verdict.
scalar/right_frac [share]: Of its pairs that are no tie, those it ranks right.
scalar/margin: Mean difference of its two rewards, without a sign.
grad_norm: The gradient's norm before clipping, mean over the updates.
lr: The learning rate.
skipped_updates [updates]: Updates left out because a gradient was not finite.
zero_gradient_updates [updates]: Updates of the step whose gradient was 0, since no response had an
    advantage. They changed neither weights nor moments; the learning-rate schedule counts them.
entropy_nats [nats]: Mean entropy of the policy at the generated tokens. Of the responses without a
    backward pass it may be estimated from a micro-batch of them.
entropy/right [nats]: Mean entropy of the tokens of right responses (rewards.right_at), over those
    that the step's passes scored: groups without an advantage may be missing.
entropy/wrong [nats]: The same of wrong responses.
policy/kl_k3 [nats]: KL divergence of the old policy from the present one, k3 estimate per token.
policy/ref_kl_k3 [nats]: KL divergence from the reference policy, k3 estimate per token.
policy/clip_frac [share]: Tokens whose ratio the objective clipped.
policy/ratio_max: The largest ratio that the objective sees.
policy/ratio_dev_max: The largest distance of a ratio from 1.
espo/group_<i>/clip_frac [share]: Tokens of entropy group i that were clipped.
espo/group_<i>/token_frac [share]: Tokens that belong to entropy group i.
espo/group_<i>/epsilon: Mean clip range of entropy group i over responses.
espo/group_<i>/floor_frac [share]: Responses in which the clip range of entropy group i is the
    floor.
# failure signatures
guard/parting_p: The p-value of "reward up, gold down" over the last rl.guard.window audited steps:
    of a falling gold label where the reward rises, else 1.
guard/reward_slope: The slope per step of the audited answers' reward over these steps.
guard/gold_slope: The slope per step of their gold labels.
guard/reward_rise_bound: The upper 95% bound of what reward/mean rose over the last rl.guard.window
    steps.
guard/loss_spike: Distance of the loss from the median of the earlier steps in the window, in their
    median distance from it.
# rollout against training
mismatch/logp_abs_diff [nats]: Mean distance of a token's log-prob in the rollout and in training;
    like its neighbours over the responses that are scored, which are a micro-batch and the logged
    ones of those without a backward pass.
mismatch/kl_k3 [nats]: KL divergence of the training from the rollout, k3 estimate.
mismatch/unknown_frac [share]: Tokens for which the sampler gave no log-prob; training's stands in
    for it, so that they have no mismatch.
mismatch/extreme_frac [share]: Tokens whose probabilities in rollout and training differ by a factor
    above 2.
mismatch/ess [share]: Effective sample size of the importance weights over the number of tokens.
mismatch/earlier/<name>: The mismatch metric of this name over the samples of earlier steps, which
    are in no other mismatch metric.
correction/weight_mean: Mean weight that the correction gives a token.
correction/dropped_frac [share]: Tokens to which the correction gave weight 0.
replay/flip_frac [share]: Tokens, over all layers, whose live experts are others than the ones used.
replay/unset_frac [share]: Tokens, over all layers, without recorded routes; they are routed live.
moe/load_max_over_mean: Tokens of the fullest expert over the mean expert's, mean over layers.
# lengths and text
response_length/mean [tokens]: Mean length of a response.
response_length/max [tokens]: Length of the longest response.
truncated_frac [share]: Responses that reached the limit on new tokens.
repetition_frac [share]: Mean share of a response's n-grams that it had said before.
padding_frac [share]: Training tokens that are padding of the length buckets.
# off policy
policy_version [updates]: Updates that the policy has had after the step.
staleness [updates]: Mean number of updates since the weights that sampled a token.
staleness_max [updates]: Updates since the oldest weights that sampled a token.
epoch [passes]: Passes over the data up to here.
data/left_out_frac [share]: Rows read so far that gave no example (too long, held out, blank or
    bad), of SFT that reads by record.
data/bad_rows [rows]: Rows so far that could not be used, of SFT that reads by record
    (sft.bad_rows).
rollout/dropped_groups [groups]: Groups that rl.step_policy generated and did not train on.
rollout/dropped_tokens [tokens]: Tokens of the groups that rl.step_policy dropped.
rollout/carried_groups [groups]: Groups that go on in the next step.
rollout/carried_tokens [tokens]: Tokens that the carried samples have by now.
# speed
rollout/tokens_per_s [tokens/s]: Tokens generated per second of the rollout.
rollout/temperature: Temperature of the step's rollout, where rl.entropy.keep controls it.
rollout/slot_occupancy [share]: Decoding steps of slots that had a live sample.
rollout/preempted [samples]: Times that a sample gave up its slot for want of pages.
rollout/prefill_tokens [tokens]: Tokens that prefills computed, a prompt's once for all its samples.
train/tokens_per_s [tokens/s]: Tokens trained on per second of scoring and updates.
train/idle_frac [share]: Tokens of responses without a backward pass: they have no advantage.
train/mfu [share]: Operations that the model needs over the chip's peak; on known chips alone.
memory/peak_gib [GiB]: The most memory so far: of the device, or on a CPU what was resident of the
    main process.
handover/bytes [bytes]: Size of the weights that were handed to the rollout.
time/step_s [s]: Time from the end of the step before, evaluations and checkpoints included (RL).
time/data_s [s]: Time that an update of SFT waited for its rows.
time/rollout_s [s]: Time of the rollout.
time/environment_s [s]: Time of the rollout in which all samples waited for environments.
time/episode_environment_s [s]: Mean time that the environment took in an episode, with its tools.
time/episode_model_s [s]: Mean time that an episode waited for the model's turns.
time/reward_wait_s [s]: Time that the step waited for rewards.
time/rollout_wait_s [s]: Time that a finished update waited for the rollout beside it
    (rl.one_step_off).
time/score_s [s]: Time of the pass for old log-probs, which the first update does not need.
time/update_s [s]: Time of the updates.
time/handover_s [s]: Time of the weight hand-over.
time/average_s [s]: Time in which the average of the weights (rl.optim.average) went to the rollout
    for an evaluation, and the policy back.
# evaluation
eval/<set>/avg_at_k [share]: Mean accuracy of k sampled answers to each prompt of a set: to the
    held-out prompts, which are the set heldout, to one of data.eval_sets, or to the held-out
    prompts of a source.
eval/<set>/avg_at_k_se [share]: Standard error of avg_at_k, clustered by prompt.
eval/<set>/avg_at_k_low [share]: Lower end of the 95% interval of avg_at_k: the percentile bootstrap
    over prompts; from Wilson's interval where all prompts have the same accuracy.
eval/<set>/avg_at_k_high [share]: Upper end of the 95% interval of avg_at_k.
eval/<set>/pass_at_k [share]: Prompts of a set with a right answer among k sampled ones.
eval/<set>/maj_at_k [share]: Accuracy of the most frequent of k sampled answers; of answers that are
    tied for it, the mean.
eval/<set>/greedy [share]: Accuracy of the greedy answers to a set.
eval/<set>/reward: Mean reward of the k sampled answers to a set; avg@k counts those of at least
    rewards.right_at.
eval/<set>/length_mean_tokens [tokens]: Mean length of the k sampled answers.
eval/<set>/truncated_frac [share]: Sampled answers to a set that reached the limit on new tokens.
eval/<set>/extracted_frac [share]: Responses in which an answer was found.
eval/<set>/<kind>_frac [share]: A set's groups of a kind, as groups/<kind>_frac.
eval/<label>/avg_at_k [share]: Mean accuracy of k sampled answers to the held-out prompts of a row's
    label.
"""


def _read(table: str) -> dict[str, Metric]:
    metrics = {}
    for entry in re.split(r"\n(?! )", table.strip()):
        if not entry.startswith("#"):
            head, _, text = entry.partition(": ")
            name, _, unit = head.rstrip("]").partition(" [")
            metrics[name] = Metric(unit, " ".join(text.split()))
    return metrics


METRICS = _read(TABLE)


def _read_panels(table: str) -> dict[str, list[Panel]]:
    panels: dict[str, list[Panel]] = {}
    for section in table.strip().removeprefix("# ").split("\n# "):
        name, *entries = re.split(r"\n(?! )", section)
        panels[name] = [_panel(*entry.split("\n")) for entry in entries]
    return panels


def _panel(head: str, *lines: str) -> Panel:
    title, unit, scale = head.split(" | ")
    return Panel(title, unit, scale, tuple(Line(*line.strip().split(" | ")) for line in lines))


# section of the page -> its panels
PANELS = _read_panels(PANEL_TABLE)


def metric_help(name: str) -> Metric | None:
    """Returns the unit and the description of a metric; None for a name that no run of this package
    logs.
    """
    if name in METRICS:
        return METRICS[name]
    return next((metric for shape, metric in METRICS.items() if _fits(shape, name)), None)


def _fits(shape: str, name: str) -> bool:
    pattern = re.escape(shape).replace("<i>", r"\d+").replace("<set>", "[^/]+")
    return re.fullmatch(re.sub(r"<[a-z]+>", ".+", pattern), name) is not None
