// Elements, numbers as words, and what the whole page shares: the data and the chosen run and step.

const data = JSON.parse(document.getElementById("data").textContent);

const SVG = "http://www.w3.org/2000/svg";

// An element. `attrs` may hold class, text, on (event -> listener), style (property -> value, set
// through the object model, which the page's policy allows) and plain attributes. Text of a run
// enters the page here and in `append` alone, as text.
function el(tag, attrs = {}, ...children) {
  return dress(document.createElement(tag), attrs, children);
}

function svg(tag, attrs = {}, ...children) {
  return dress(document.createElementNS(SVG, tag), attrs, children);
}

function dress(node, attrs, children) {
  for (const [name, value] of Object.entries(attrs)) {
    if (value === undefined || value === null || value === false) continue;
    if (name === "text") node.textContent = value;
    else if (name === "on") for (const [e, f] of Object.entries(value)) node.addEventListener(e, f);
    else if (name === "style") for (const [p, v] of Object.entries(value)) node.style.setProperty(p, v);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.filter((x) => x !== null && x !== undefined));
  return node;
}

function clear(node, ...children) {
  node.replaceChildren(...children.filter((x) => x !== null && x !== undefined));
  return node;
}

const finite = (x) => typeof x === "number" && Number.isFinite(x);

function plain(x) {
  if (!finite(x)) return "–";
  if (x === 0) return "0";
  const size = Math.abs(x);
  if (size >= 1e6 || size < 1e-3) return x.toExponential(1).replace("e+", "e");
  if (Number.isInteger(x)) return x.toLocaleString("en-US");
  return String(Number(x.toPrecision(size >= 100 ? 4 : 3)));
}

const percent = (x) => (finite(x) ? `${(100 * x).toFixed(x > 0 && x < 0.0995 ? 1 : 0)}%` : "–");

const precise = (x) => (finite(x) ? `${(100 * x).toFixed(1)}%` : "–");

// Tokens: 1,234 or 12.3 k or 4.56 M.
function counted(x) {
  if (!finite(x)) return "–";
  if (x < 10000) return Math.round(x).toLocaleString("en-US");
  if (x < 1e6) return `${(x / 1e3).toFixed(x < 1e5 ? 1 : 0)} k`;
  return x < 1e9 ? `${(x / 1e6).toFixed(2)} M` : `${(x / 1e9).toFixed(2)} G`;
}

const signed = (x) => (finite(x) && x > 0 ? `+${plain(x)}` : plain(x));

// The unit of a metric, and what it says; of those that the project documents.
const unitOf = (metric) => data.help[metric]?.[0] ?? "";
const meaning = (metric) => data.help[metric]?.[1] ?? "";

const mean = (xs) => (xs.length ? xs.reduce((a, b) => a + b, 0) / xs.length : NaN);

function median(xs) {
  const sorted = [...xs].sort((a, b) => a - b);
  return sorted.length ? sorted[sorted.length >> 1] : NaN;
}

// ---- what the reader has chosen -----------------------------------------------------------------

const state = { run: 0, at: 0, only: false, axis: "step" };
const listeners = { run: [], step: [], axis: [] };

const current = () => data.runs[state.run];
const steps = () => current().curves.steps;
const stepNow = () => steps()[state.at];

function tell(what) {
  for (const listener of listeners[what]) listener();
}

function chooseRun(i) {
  state.run = i;
  state.at = steps().length - 1;
  tell("run");
  tell("axis");
  tell("step");
}

function chooseStep(at) {
  state.at = Math.max(0, Math.min(steps().length - 1, at));
  tell("step");
}

// The x axes of a run's curves: name -> {title, format, xs}. An axis that the run did not log is left out.
function axesOf(run) {
  const axes = { step: { title: "step", format: plain, xs: run.curves.steps } };
  if (run.tokens.length) axes.tokens = { title: "tokens", format: counted, xs: run.tokens };
  if (run.hours.length) axes.hours = { title: "hours", format: plain, xs: run.hours };
  return axes;
}

const axisOf = (run) => axesOf(run)[state.axis] ?? axesOf(run).step;
const xNow = () => axisOf(current()).xs[state.at];

// Where a step lies on the chosen axis; step 0 is before everything.
function onAxis(run, step) {
  const { title, xs } = axisOf(run);
  if (title === "step" || step === 0) return step;
  const at = run.curves.steps.findIndex((x) => x >= step);
  return xs[at < 0 ? xs.length - 1 : at];
}

function chooseAxis(name) {
  state.axis = name;
  tell("axis");
  tell("step");
}

// The point of the curves that is nearest to a place on the chosen axis.
function pointAt(x) {
  const { xs } = axisOf(current());
  return xs.reduce((best, v, i) => (Math.abs(v - x) < Math.abs(xs[best] - x) ? i : best), 0);
}

// ---- the tooltip --------------------------------------------------------------------------------

const tip = el("div", { id: "tip", role: "tooltip" });

function showTip(event, rows) {
  clear(tip, ...rows.map(([name, value, colour]) =>
    el("div", { class: "row" },
      colour ? el("i", { class: "swatch", style: { background: colour } }) : null,
      el("span", { text: name }),
      el("b", { text: value }))));
  tip.classList.add("on");
  const box = tip.getBoundingClientRect();
  const x = Math.min(event.clientX + 14, window.innerWidth - box.width - 8);
  const below = event.clientY + 18 + box.height < window.innerHeight;
  tip.style.left = `${Math.max(4, x)}px`;
  tip.style.top = `${below ? event.clientY + 18 : Math.max(4, event.clientY - box.height - 12)}px`;
}

const hideTip = () => tip.classList.remove("on");
