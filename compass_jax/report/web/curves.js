// The curves of the chosen run.

const BLUE = "var(--blue)", ORANGE = "var(--orange)", GREEN = "var(--green)";
const RED = "var(--red)", SKY = "var(--sky)", GREY = "var(--grey)", PURPLE = "var(--purple)";

// title, unit, [metric, name, colour], scale
const PANELS = [
  ["Reward", "mean of known raw rewards", [["reward/mean", "reward", BLUE]]],
  ["Held-out accuracy", "share of answers", [
    ["eval/heldout/avg_at_k", "mean of k samples", BLUE], ["eval/heldout/pass_at_k", "any of k samples", SKY],
    ["eval/heldout/greedy", "greedy", ORANGE]], "share"],
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
    ["time/update_s", "updates", ORANGE]]],
  ["Speed", "tokens per second", [
    ["rollout/tokens_per_s", "rollout", BLUE], ["train/tokens_per_s", "training", ORANGE]]],
];

function linesOf(run, wanted) {
  return wanted.filter(([metric]) => run.curves.metrics[metric]?.v.some(finite))
    .map(([metric, name, colour]) => ({ name, colour, xs: run.curves.steps, ys: run.curves.metrics[metric].v,
      said: `${metric}: ${meaning(metric)}` }));
}

function badNote(run, metrics) {
  const bad = metrics.reduce((n, m) => n + (run.curves.metrics[m]?.bad ?? 0), 0);
  return bad ? `not finite at ${bad} step${bad > 1 ? "s" : ""}: gaps` : "";
}

// Charts of panels that have something to show; each follows the step slider.
function panelCharts(run, panels) {
  const pick = (step) => chooseStep(pointOf(step));
  return panels.map(([title, unit, wanted, scale]) => {
    const lines = linesOf(run, wanted);
    const note = badNote(run, wanted.map((x) => x[0]));
    return lines.length ? chart({ title, unit, lines, scale, pick, note }) : null;
  }).filter(Boolean);
}

function curvesSection() {
  const grid = el("div", { class: "charts" });
  const extra = el("div", { class: "charts" });
  const choice = el("select", { "aria-label": "another metric", on: { change: () => drawExtra() } });
  let charts = [], more = null;
  const mark = () => [...charts, ...(more ? [more] : [])].forEach((c) => c.mark(stepNow()));
  function drawExtra() {
    const name = choice.value, run = current();
    more = name ? panelCharts(run, [[name, unitOf(name), [[name, name, BLUE]]]])[0] ?? null : null;
    clear(extra, more?.node, more && meaning(name) ? el("p", { class: "lead", text: meaning(name) }) : null);
    if (more) more.mark(stepNow());
  }
  listeners.run.push(() => {
    charts = panelCharts(current(), PANELS);
    clear(grid, ...charts.map((c) => c.node));
    const names = Object.keys(current().curves.metrics).sort();
    clear(choice, el("option", { value: "", text: `any of ${names.length} metrics …` }),
      ...names.map((x) => el("option", { value: x, text: x })));
    drawExtra();
  });
  listeners.step.push(mark);
  return section("curves", "Curves", "A click into a curve moves the slider to that step.", grid,
    el("label", { class: "field" }, el("span", { text: "Another metric" }), choice), extra);
}

function section(id, title, text, ...children) {
  return el("section", { id }, el("h2", { text: title }), text ? el("p", { class: "lead", text }) : null, ...children);
}
