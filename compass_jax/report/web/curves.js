// The curves of the chosen run.

// title, unit, [metric, name, colour], scale
const PANELS = [
  ["Reward", "mean of known raw rewards", [["reward/mean", "reward", BLUE]]],
  ["Groups by reward", "share of groups", [
    ["groups/varied_frac", "varied", BLUE], ["groups/all_right_frac", "all right", GREEN],
    ["groups/all_wrong_frac", "all wrong", RED], ["groups/between_frac", "between", ORANGE]], "share"],
  ["What the tokens taught", "share of generated tokens", [
    ["waste/frac_verifier_signal", "verifier", BLUE], ["waste/frac_shaping_signal", "shaping", SKY],
    ["waste/frac_entropy_signal", "entropy (RL-ZVP)", GREEN], ["waste/frac_none", "none", GREY]], "stacked"],
  ["Entropy of the policy", "nats per token", [["entropy_nats", "entropy", ORANGE]]],
  ["Response length", "tokens", [
    ["response_length/mean", "mean", BLUE], ["response_length/max", "longest", SKY]]],
  ["Truncated and repeated", "share", [
    ["truncated_frac", "responses truncated", RED], ["repetition_frac", "n-grams repeated", PURPLE]], "share"],
  ["Clipped tokens", "share of tokens", [["policy/clip_frac", "clipped", RED]], "share"],
  ["KL to the old policy", "k3, nats per token", [["policy/kl_k3", "kl", PURPLE]], "log"],
  ["Gradient norm", "before clipping", [["grad_norm", "norm", GREEN]], "log"],
  ["Loss", "nats per token", [["sft/loss", "SFT loss", BLUE]]],
  ["Learning rate", "per update", [["lr", "lr", GREY]]],
  ["Time of a step", "seconds", [
    ["time/rollout_s", "rollout", BLUE], ["time/score_s", "old log-probs", SKY],
    ["time/update_s", "updates", ORANGE], ["time/step_s", "whole step", GREY]], "time"],
  ["Speed", "tokens per second", [
    ["rollout/tokens_per_s", "rollout", BLUE], ["train/tokens_per_s", "training", ORANGE]]],
];

// Panels whose lines the run names itself: the parts of its reward, and its labels.
function ownPanels(run) {
  const named = (pattern) => Object.keys(run.curves.metrics).map((metric) => [metric, metric.match(pattern)?.[1]])
    .filter(([metric, name]) => name && run.curves.metrics[metric].v.some(finite))
    .map(([metric, name], i) => [metric, name, shadeOf(i), dashOf(i)]);
  const parts = named(/^reward\/([^/]+)\/mean$/).filter(([metric]) => run.curves.metrics[metric].v.some((v) => v));
  return [
    ["Parts of the reward", "mean over the samples that have it", parts.length > 1 || parts[0]?.[1] !== "verifier" ? parts : []],
    ["Pass rate by label", "share of right responses", named(/^label\/(.+)\/pass_rate$/), "share"],
    ["Response length by label", "tokens, mean", named(/^label\/(.+)\/length_mean_tokens$/)],
  ];
}

function linesOf(run, wanted) {
  const { xs } = axisOf(run);
  return wanted.filter(([metric]) => run.curves.metrics[metric]?.v.some(finite))
    .map(([metric, name, colour, dash]) => ({ name, colour, dash, xs, ys: run.curves.metrics[metric].v,
      said: `${metric}: ${meaning(metric)}` }));
}

function badNote(run, metrics) {
  const bad = metrics.reduce((n, m) => n + (run.curves.metrics[m]?.bad ?? 0), 0);
  return bad ? `not finite at ${bad} step${bad > 1 ? "s" : ""}: gaps` : "";
}

const pick = (x) => chooseStep(pointAt(x));

// Charts of panels that have something to show; each follows the step slider.
function panelCharts(run, panels) {
  const { title: xname, format } = axisOf(run);
  return panels.map(([title, unit, wanted, scale]) => {
    const lines = linesOf(run, wanted);
    const note = badNote(run, wanted.map((x) => x[0]));
    return lines.length ? chart({ title, unit, lines, scale, pick, note, xname, xformat: format }) : null;
  }).filter(Boolean);
}

function heatCharts(run) {
  const titles = { reward: ["Rewards", "distribution over a step's samples"], response_length: ["Lengths", "tokens, distribution over a step's samples"] };
  return Object.entries(titles).filter(([name]) => run.histograms[name]?.steps.length > 1)
    .map(([name, [title, unit]]) => heatChart({ title, unit, map: run.histograms[name], run, pick }));
}

function curvesSection() {
  const grid = el("div", { class: "charts" });
  const extra = el("div", { class: "charts" });
  const choice = el("select", { "aria-label": "another metric", on: { change: () => drawExtra() } });
  let charts = [], more = null;
  const mark = () => [...charts, ...(more ? [more] : [])].forEach((c) => c.mark(xNow()));
  function drawExtra() {
    const name = choice.value, run = current();
    more = name ? panelCharts(run, [[name, unitOf(name), [[name, name, BLUE]]]])[0] ?? null : null;
    clear(extra, more?.node, more && meaning(name) ? el("p", { class: "lead", text: meaning(name) }) : null);
    if (more) more.mark(xNow());
  }
  listeners.axis.push(() => {
    const run = current(), [reward, ...others] = PANELS;
    charts = [...panelCharts(run, [reward, ...ownPanels(run)]), ...heatCharts(run), ...panelCharts(run, others)];
    clear(grid, ...charts.map((c) => c.node));
    drawExtra();
  });
  listeners.run.push(() => {
    const names = Object.keys(current().curves.metrics).sort();
    clear(choice, el("option", { value: "", text: `any of ${names.length} metrics …` }),
      ...names.map((x) => el("option", { value: x, text: x })));
  });
  listeners.step.push(mark);
  return section("curves", "Curves", "A click into a curve moves the slider to that step.", grid,
    el("label", { class: "field" }, el("span", { text: "Another metric" }), choice), extra);
}

function section(id, title, text, ...children) {
  return el("section", { id }, el("h2", { text: title }), text ? el("p", { class: "lead", text }) : null, ...children);
}
