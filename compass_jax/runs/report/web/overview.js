// The first card: which share of the tokens taught; held-out accuracy over the run, with its intervals and
// its start; then each label. Several runs share the card.

// The accuracies of a set as a line; null where the run has none, or not that axis.
function heldoutLine(run, set, name, colour, axis = state.axis) {
  if (!set || (axis !== "step" && !axesOf(run)[axis])) return null;
  const before = state.axis;
  state.axis = axis;
  const xs = set.points.map((p) => onAxis(run, p.step));
  state.axis = before;
  const of = (key) => set.points.map((p) => p[key] ?? null);
  return { name, colour, xs, ys: of("avg_at_k"), low: of("avg_at_k_low"), high: of("avg_at_k_high"),
    said: "eval/<set>/avg_at_k: mean accuracy of k sampled answers" };
}

const intervalOf = (point) => (finite(point.avg_at_k_low)
  ? `${precise(point.avg_at_k_low)} to ${precise(point.avg_at_k_high)}` : "");

function setChart(run, name, set) {
  const k = set.k ?? "k", { title: xname, format } = axisOf(run);
  const main = heldoutLine(run, set, `mean of ${k} samples`, BLUE);
  const other = (key, label, colour) => ({ ...main, name: label, colour, ys: set.points.map((p) => p[key] ?? null), low: undefined, high: undefined, said: label });
  const lines = [main, other("greedy", "greedy answer", ORANGE), other("pass_at_k", `any of ${k} samples`, SKY)].filter((l) => l.ys.some(finite));
  const start = set.points[0];
  if (start.step === 0 && set.points.length > 1) {
    const ends = [main.xs[0], main.xs[main.xs.length - 1]];
    lines.push({ name: "start", colour: GREY, dash: "4 4", xs: ends, ys: [start.avg_at_k, start.avg_at_k], said: "before the first step" });
  }
  const title = name === "heldout" ? "Held-out accuracy" : `Accuracy on ${name}`;
  return chart({ title, unit: "share of right answers; shaded: 95% interval", lines, scale: "share", pick, xname, xformat: format, wide: true });
}

// One sentence: the share of the generated tokens that had a training signal, by its source.
function taughtBy(f) {
  if (!f || !f.generated) return "";
  const share = (tokens) => percent(tokens / f.generated);
  const signals = [["verifier", "rewards that differ within a group"], ["shaping", "shaping"], ["entropy", "entropy alone"],
    ["prediction", "the prediction alone"]]
    .filter(([key]) => f[key]);
  const taught = signals.reduce((sum, [key]) => sum + f[key], 0);
  if (!taught) return `None of ${counted(f.generated)} generated tokens taught.`;
  const by = signals.map(([key, text]) => (signals.length > 1 ? `${share(f[key])} ${text}` : text)).join(", ");
  return `${share(taught)} of ${counted(f.generated)} generated tokens taught (by ${by}); ${share(f.generated - taught)} taught nothing.`;
}

// All runs of the page over each other.
function runsChart(name) {
  const { title: xname, format } = axisOf(current());
  const lines = data.runs.map((run, i) => heldoutLine(run, run.heldout[name], run.name, shadeOf(i))).filter(Boolean)
    .map((line, i) => ({ ...line, dash: dashOf(i) }));
  const title = name === "heldout" ? "Held-out accuracy" : `Accuracy on ${name}`;
  return chart({ title, unit: "mean of k samples; shaded: 95% interval", lines, scale: "share", pick, xname, xformat: format, wide: true });
}

// The numbers of each run that has evaluated the set, with its colour.
const runsGains = (name) => data.runs.flatMap((run, i) => (run.heldout[name] ? [
  el("h3", {}, el("i", { class: "swatch", style: { background: shadeOf(i) } }), run.name), ...gainOf(run.heldout[name]), labelTable(run.heldout[name], false),
] : []));

const sharedBy = (name) => data.runs.filter((run) => run.heldout[name]).length > 1;

function gainOf(set) {
  const first = set.points[0], last = set.points[set.points.length - 1];
  const prompts = finite(set.prompts) ? `${set.prompts.toLocaleString("en-US")} prompts` : "the prompts";
  const rows = [];
  const row = (name, value, small) => rows.push(el("div", { class: "gain" }, el("span", { class: "dim", text: name }),
    el("b", { text: value }), el("span", { class: "small", text: small })));
  if (first.step === 0) row("before the first step", precise(first.avg_at_k), intervalOf(first));
  if (last !== first || first.step) row(`after step ${last.step.toLocaleString("en-US")}`, precise(last.avg_at_k), intervalOf(last));
  if (last !== first && finite(last.avg_at_k) && finite(first.avg_at_k)) {
    row("change", `${signed(Number((100 * (last.avg_at_k - first.avg_at_k)).toFixed(1)))} points`, `from step ${first.step}`);
  }
  if (finite(last.greedy)) row("greedy answers", precise(last.greedy), finite(first.greedy) && last !== first ? `from ${precise(first.greedy)}` : "");
  return [...rows, el("p", { class: "small", text: `Mean of ${set.k ?? "k"} samples of each of ${prompts}. Intervals: 95%, bootstrap over `
    + "the prompts (Wilson's where all prompts agree). They say nothing of another seed." })];
}

function labelTable(set, open = true) {
  const labels = Object.entries(set.by);
  if (labels.length < 2) return null;
  return el("details", { open: open && labels.length <= 12 }, el("summary", { text: `By label (${labels.length})` }),
    el("table", {}, el("tr", {}, ...["label", "prompts", "start", "end", "95% interval"].map((t, i) => el("th", { class: i ? "n" : "", text: t }))),
      ...labels.map(([label, [count, start, end, [low, high]]]) => el("tr", {}, el("td", { class: "name", text: label }),
        ...[plain(count), precise(start), precise(end), `${precise(low)} to ${precise(high)}`].map((t) => el("td", { class: "n", text: t }))))));
}

function overviewSection() {
  const body = el("div", {});
  let charts = [];
  listeners.axis.push(() => {
    const run = current(), sets = Object.entries(run.heldout);
    charts = [];
    if (run.stage !== "rl") {
      clear(body);
      return;
    }
    const sentence = el("div", {}, ...data.runs.map((r) => [r, taughtBy(r.funnel)]).filter(([, text]) => text)
      .map(([r, text]) => el("p", { class: "taught", text: data.runs.length > 1 ? `${r.name}: ${text}` : text })));
    if (!sets.length) {
      clear(body, sentence, el("p", { class: "empty", text: "This run has evaluated nothing yet: the first evaluation comes with rl.eval_every, "
        + "evaluation.at or the end of the run, on data.eval_prompts or data.eval_sets." }));
      return;
    }
    clear(body, sentence, ...sets.map(([name, set]) => {
      const shared = sharedBy(name), drawn = shared ? runsChart(name) : setChart(run, name, set);
      charts.push(drawn);
      const gains = shared ? runsGains(name) : [...gainOf(set), labelTable(set)];
      return el("div", { class: "overview" }, drawn.node, el("div", { class: "gains" }, ...gains));
    }));
  });
  listeners.step.push(() => charts.forEach((c) => c.mark(xNow())));
  return el("section", { id: "accuracy" }, body);
}
