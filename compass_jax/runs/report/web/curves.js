// The curves of the chosen run.

const panel = (title, unit, lines, scale) => ({ title, unit, lines, scale });

// The panels of a section (compass_jax/runs/metric_table.py), with the page's own colours.
const panelsOf = (section) => data.panels[section].map((p) =>
  ({ ...p, lines: p.lines.map(([metric, name, colour]) => [metric, name, `var(--${colour})`]) }));

// Panels whose lines the run names itself: the parts of its reward, and its labels.
function ownPanels(run) {
  const named = (pattern) => Object.keys(run.curves.metrics).map((metric) => [metric, metric.match(pattern)?.[1]])
    .filter(([metric, name]) => name && run.curves.metrics[metric].v.some(finite))
    .map(([metric, name], i) => [metric, name, shadeOf(i), dashOf(i)]);
  const byLabel = (title, unit, lines, scale) => ({ ...panel(title, unit, lines, scale), apart: lines.length > 1 });
  const parts = named(/^reward\/([^/]+)\/mean$/).filter(([metric]) => run.curves.metrics[metric].v.some((v) => v));
  return [
    panel("Parts of the reward", "mean over the samples that have it", parts.length > 1 || parts[0]?.[1] !== "verifier" ? parts : []),
    byLabel("Pass rate by label", "share of right responses", named(/^label\/(.+)\/pass_rate$/), "share"),
    byLabel("Response length by label", "tokens, mean", named(/^label\/(.+)\/length_mean_tokens$/)),
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
  return panels.map(({ title, unit, lines: wanted, scale, apart }) => {
    const lines = linesOf(run, wanted);
    const note = badNote(run, wanted.map((x) => x[0]));
    if (apart && lines.length) return multiples({ title, unit, lines, scale, note, xname, xformat: format });
    return lines.length ? chart({ title, unit, lines, scale, pick, note, xname, xformat: format }) : null;
  }).filter(Boolean);
}

// A small chart for each line, all with the same axes.
function multiples({ title, unit, lines, note, scale, ...axes }) {
  const range = rangeOf(lines, scale);
  const charts = lines.map((line) => chart({ title: line.name, unit: "", lines: [{ ...line, colour: BLUE, dash: null }],
    scale, range, pick, small: true, ...axes }));
  const node = el("div", { class: "multiples" },
    el("div", { class: "heading" }, el("b", { text: title }), " ", el("span", { class: "unit", text: unit })),
    el("div", { class: "smalls" }, ...charts.map((c) => c.node)), note ? el("div", { class: "note", text: note }) : null);
  return { node, mark: (at) => charts.forEach((c) => c.mark(at)) };
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
    more = name ? panelCharts(run, [panel(name, unitOf(name), [[name, name, BLUE]])])[0] ?? null : null;
    clear(extra, more?.node, more && meaning(name) ? el("p", { class: "lead", text: meaning(name) }) : null);
    if (more) more.mark(xNow());
  }
  listeners.axis.push(() => {
    const run = current(), [reward, ...others] = panelsOf("curves");
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
