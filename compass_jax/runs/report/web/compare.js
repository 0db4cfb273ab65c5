// Two or more runs over each other: by step, or by the tokens that they have generated.

// metric, title, unit, scale
const COMPARED = [
  ["reward/mean", "Reward", "mean of known raw rewards"],
  ["groups/varied_frac", "Groups that vary", "share of groups", "share"],
  ["waste/frac_verifier_signal", "Tokens taught by a verifier", "share", "share"],
  ["waste/frac_none", "Tokens that taught nothing", "share", "share"],
  ["entropy_nats", "Entropy of the policy", "nats per token"],
  ["response_length/mean", "Response length", "tokens, mean"],
  ["mismatch/logp_abs_diff", "Rollout against training", "|log-prob difference|, nats", "log"],
  ["grad_norm", "Gradient norm", "before clipping", "log"],
];

// Accuracy after the last evaluation of a run that has one.
const lastAccuracy = (run) => run.heldout.heldout?.points.at(-1)?.avg_at_k;

// Mean of a metric's last tenth before `tokens` generated tokens.
function around(run, metric, tokens) {
  const ys = run.curves.metrics[metric]?.v;
  if (!ys) return NaN;
  const until = run.tokens.length ? run.tokens.filter((t) => t <= tokens * 1.0000001).length : ys.length;
  const tail = ys.slice(Math.max(0, until - Math.max(1, Math.round(ys.length / 10))), until);
  return mean(tail.filter(finite));
}

function compareSection() {
  if (data.runs.length < 2) {
    return section("compare", "Comparison", "", el("p", { class: "empty",
      text: "One run is on this page. compass report RUN RUN compares several." }));
  }
  const grid = el("div", { class: "charts" });
  const by = el("select", { id: "by", "aria-label": "x axis", on: { change: () => draw() } },
    ...[["step", "steps"], ["tokens", "generated tokens"], ["hours", "hours"]]
      .filter(([name]) => data.runs.every((run) => axesOf(run)[name]))
      .map(([value, text]) => el("option", { value, text })));
  const names = [...new Set(data.runs.flatMap((r) => Object.keys(r.curves.metrics)))].sort();
  const other = el("select", { "aria-label": "another metric", on: { change: () => draw() } },
    el("option", { value: "", text: `any of ${names.length} metrics …` }), ...names.map((x) => el("option", { value: x, text: x })));
  function one([metric, title, unit, scale]) {
    const lines = data.runs.map((run, i) => ({ run, name: run.name, colour: shadeOf(i), dash: dashOf(i),
      xs: axesOf(run)[by.value]?.xs ?? [], ys: run.curves.metrics[metric]?.v ?? [] }))
      .filter((l) => l.xs.length && l.ys.some(finite));
    const { title: xname, format } = axesOf(data.runs[0])[by.value] ?? axesOf(data.runs[0]).step;
    return lines.length ? chart({ title, unit, lines, scale, xname, xformat: format }).node : null;
  }
  function draw() {
    const wanted = [...COMPARED, ...(other.value ? [[other.value, other.value, unitOf(other.value)]] : [])];
    clear(grid, ...wanted.map(one));
  }
  draw();
  const spent = data.runs.filter((r) => r.tokens.length);
  const equal = Math.min(...spent.map((r) => r.tokens[r.tokens.length - 1]));
  const shown = COMPARED.filter(([m]) => data.runs.some((r) => r.curves.metrics[m]));
  const table = (title, value) => el("div", {}, el("h3", { text: title }), el("table", {},
    el("tr", {}, el("th", { text: "" }), ...data.runs.map((r, i) => el("th", { class: "n" },
      el("i", { class: "swatch", style: { background: shadeOf(i) } }), r.name))),
    data.runs.some((r) => finite(lastAccuracy(r))) && !title.includes("equal") ? el("tr", {}, el("td", { text: "Held-out accuracy, last evaluation" }),
      ...data.runs.map((r) => el("td", { class: "n", text: percent(lastAccuracy(r)) }))) : null,
    ...shown.map(([m, name, unit, scale]) => el("tr", {}, el("td", {}, name, el("span", { class: "dim", text: ` ${unit}` })),
      ...data.runs.map((r) => { const v = value(r, m); return el("td", { class: "n", text: scale === "share" ? percent(v) : plain(v) }); })))));
  return section("compare", "Comparison", "All runs of this page; the offline filter's tokens count as generated.",
    el("div", { class: "bar" }, el("label", { class: "field" }, el("span", { text: "Over" }), by),
      el("label", { class: "field" }, el("span", { text: "Another metric" }), other)),
    grid,
    el("div", { class: "two even" },
      table("At the end: mean of the last tenth of the points", (r, m) => around(r, m, Infinity)),
      spent.length > 1 ? table(`At equal generated tokens: ${counted(equal)}`, (r, m) => (r.tokens.length ? around(r, m, equal) : NaN)) : null));
}
