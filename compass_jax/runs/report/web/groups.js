// The browser of logged groups: a list to sort and search, and the samples of one group side by side.

// name, unit, one colour or two, value of a token's number on the scale
const COLOURS = {
  advantage: { name: "advantage", unit: "", two: true },
  entropy: { name: "entropy", unit: "nats", rgb: [230, 159, 0] },
  logp: { name: "log-prob of training", unit: "nats", rgb: [204, 121, 167], of: (v) => -v },
  logp_diff: { name: "log-prob difference, training - rollout", unit: "nats", two: true },
  ratio: { name: "ratio (underlined: clipped)", unit: "", two: true, of: (v) => Math.log(v) },
  version: { name: "policy version", unit: "updates", rgb: [0, 158, 115], from: true },
};
const UP = [0, 114, 178], DOWN = [213, 94, 0];
const PER_PAGE = 40;

const known = (g) => g.samples.filter((s) => s.outcome === "ok" && finite(s.reward)).map((s) => s.reward);

function factsOf(g) {
  if (!g.facts) {
    const rewards = known(g), m = mean(rewards);
    g.facts = {
      reward: m,
      variance: rewards.length ? mean(rewards.map((r) => (r - m) ** 2)) : NaN,
      length: mean(g.samples.map((s) => s.tokens).filter(finite)),
      text: [g.label, wordsOf(g.prompt), wordsOf(g.answer), ...g.samples.map(wordsIn)]
        .join("\n").toLowerCase(),
    };
  }
  return g.facts;
}

const wordsOf = (text) => (typeof text === "string" ? text : `${text.head} … ${text.tail}`);

// The texts that a sample shows: its parts, or the response.
const textsOf = (s) => (s.parts ? s.parts.map((p) => p.text) : [s.response]);
const wordsIn = (s) => textsOf(s).map(wordsOf).join("\n");
// with spaces in the place of what is left out
const wholeText = (s) => textsOf(s).map((t) => (typeof t === "string" ? t : t.head + " ".repeat(t.left_out) + t.tail)).join("");

// A text that may have lost its middle.
function textNodes(text) {
  if (typeof text === "string") return [text];
  const said = ` … ${text.left_out.toLocaleString("en-US")} characters left out; rollouts.jsonl has them … `;
  return [text.head, el("span", { class: "cut", text: said }), text.tail];
}

const tint = (rgb, alpha) => `rgba(${rgb.join(",")},${alpha.toFixed(3)})`;

function rewardTint(reward, g) {
  const { reward: m } = factsOf(g);
  const most = Math.max(...known(g).map((r) => Math.abs(r - m)), 1e-9);
  if (!finite(reward)) return "transparent";
  return tint(reward >= m ? UP : DOWN, 0.75 * Math.min(1, Math.abs(reward - m) / most));
}

// ---- tokens -------------------------------------------------------------------------------------

const valueAt = (column, i) => (Array.isArray(column) ? column[i] : column);

// The scale of a value over the samples of a group: what fills a token's colour.
function scaleOf(g, key) {
  const { of = (v) => v, two, from } = COLOURS[key];
  const all = [];
  for (const s of g.samples) {
    if (!s.values || s.values[key] === undefined) continue;
    for (let i = 0; i < s.values.text.length; i++) {
      const v = valueAt(s.values[key], i);
      if (finite(v)) all.push(of(v));
    }
  }
  if (!all.length) return null;
  all.sort((a, b) => a - b);
  const low = all[0], high = all[all.length - 1];
  if (two) {
    const most = Math.max(Math.abs(low), Math.abs(high));
    if (!most) return { low: 0, high: 0, fill: () => "transparent" };
    return { low: -most, high: most, fill: (v) => tint(of(v) >= 0 ? UP : DOWN, 0.8 * Math.min(1, Math.abs(of(v)) / most)) };
  }
  const least = from ? low : Math.min(0, low);
  const top = from ? high : all[Math.floor(0.99 * (all.length - 1))] || high;
  const span = top - least || 1;
  return { low: least, high: top, fill: (v) => tint(COLOURS[key].rgb, 0.08 + 0.72 * Math.max(0, Math.min(1, (of(v) - least) / span))) };
}

// Draws a response, or a part of it whose tokens are those from `from` to `to`; they are spans with
// the number `data-i` where the run logged theirs.
function paint(box, sample, key, scale, text = sample.response, from = 0, to = Infinity) {
  box.sample = sample;
  const { values } = sample;
  if (!values || !scale || values[key] === undefined || from >= values.text.length) {
    clear(box, ...textNodes(text));
    return;
  }
  const head = typeof text === "string" ? text : text.head;
  // the run counts characters, and a character beyond 16 bits is two units here
  const units = /[\ud800-\udfff]/.test(head) ? Array.from(head) : head;
  const taken = (a, b) => (typeof units === "string" ? units.slice(a, b) : units.slice(a, b).join(""));
  const all = document.createDocumentFragment();
  const end = Math.min(to, values.text.length);
  let at = 0;
  for (let i = from; i < end && (at < units.length || !values.text[i]); i++) {
    const next = at + values.text[i], v = valueAt(values[key], i);
    const piece = taken(at, next);
    const span = document.createElement("span");
    span.className = valueAt(values.clipped ?? 0, i) && key === "ratio" ? "t clipped" : "t";
    span.dataset.i = i;
    span.textContent = piece || (i === end - 1 ? "■" : "·");
    if (!piece) span.classList.add("silent");
    if (finite(v)) span.style.backgroundColor = scale.fill(v);
    all.append(span);
    at = next;
  }
  const rest = at < units.length ? taken(at, units.length) : "";
  if (rest) all.append(el("span", { class: "rest", text: rest, title: "The numbers of these tokens are not logged." }));
  if (typeof text !== "string") all.append(...textNodes(text).slice(1));
  clear(box, all);
}

function tokenRows(sample, i) {
  const { values } = sample;
  const rows = [[`token ${i + 1} of ${counted(sample.tokens)}`, ""]];
  for (const key of Object.keys(COLOURS)) {
    if (values[key] === undefined) continue;
    const v = valueAt(values[key], i), { name, unit, two } = COLOURS[key];
    let word = two && key !== "ratio" ? signed(v) : plain(v);
    if (unit && finite(v)) word += key === "version" ? "" : ` ${unit}`;
    if (key === "logp" && finite(v)) word += ` (p ${plain(Math.exp(v))})`;
    if (key === "ratio" && valueAt(values.clipped ?? 0, i)) word += ", clipped";
    rows.push([name.replace(" (underlined: clipped)", " of the objective"), word]);
  }
  return rows;
}

// ---- one group ----------------------------------------------------------------------------------

function groupView() {
  const root = el("div", { class: "group" });
  const colour = el("select", { id: "colour", "aria-label": "colour tokens by", on: { change: () => draw() } });
  const legend = el("div", { class: "scale" });
  const cards = el("div", { class: "cards" });
  let group = null, order = "sampled";
  const sorter = el("select", { "aria-label": "order of the samples", on: { change: (e) => { order = e.target.value; draw(); } } },
    ...["sampled", "reward", "length"].map((x) => el("option", { value: x, text: x })));
  cards.addEventListener("mousemove", (event) => {
    const span = event.target.closest?.(".t");
    if (span) showTip(event, tokenRows(span.parentNode.sample, Number(span.dataset.i)));
    else hideTip();
  });
  cards.addEventListener("mouseleave", hideTip);

  function show(g) {
    group = g;
    if (!g) {
      clear(root, el("p", { class: "empty", text: "No group is chosen." }));
      return;
    }
    const has = Object.keys(COLOURS).filter((key) => g.samples.some((s) => s.values?.[key] !== undefined));
    const before = colour.value;
    clear(colour, el("option", { value: "", text: "nothing" }),
      ...Object.keys(COLOURS).map((key) => el("option", { value: key, disabled: !has.includes(key),
        text: COLOURS[key].name + (has.includes(key) ? "" : current().has_tokens ? " (no numbers here)" : " (not logged)") })));
    colour.value = has.includes(before) ? before : has.includes("entropy") ? "entropy" : "";
    const { reward, variance } = factsOf(g);
    clear(root,
      el("header", {}, el("b", { text: g.label || "no label" }),
        el("span", { text: `step ${g.step}` }), el("span", { text: `mean reward ${plain(reward)}` }),
        el("span", { text: `variance ${plain(variance)}` }),
        g.visit ? el("span", { text: `visit ${g.visit + 1}` }) : null),
      el("pre", { class: "prompt" }, ...textNodes(g.prompt)),
      wordsOf(g.answer) ? el("div", { class: "truth" }, el("span", { class: "dim", text: "reference " }), ...textNodes(g.answer)) : null,
      el("div", { class: "bar" }, el("label", { class: "field" }, el("span", { text: "Colour tokens by" }), colour), legend,
        el("label", { class: "field" }, el("span", { text: "Samples as" }), sorter)),
      cards);
    draw();
  }

  function draw() {
    const key = colour.value, scale = key ? scaleOf(group, key) : null;
    drawScale(legend, key, scale);
    const samples = [...group.samples];
    if (order === "reward") samples.sort((a, b) => (b.reward ?? -1e9) - (a.reward ?? -1e9));
    if (order === "length") samples.sort((a, b) => (b.tokens ?? 0) - (a.tokens ?? 0));
    cards.classList.toggle("broad", samples.some((s) => s.parts));
    clear(cards, ...samples.map((s) => card(s, group, key, scale)));
  }
  return { root, show };
}

function drawScale(legend, key, scale) {
  if (!scale) {
    clear(legend, el("span", { class: "dim", text: key ? "" : "no colour" }));
    return;
  }
  const { two, unit, rgb } = COLOURS[key];
  if (scale.low === scale.high) {
    clear(legend, el("span", { text: `all ${plain(key === "ratio" ? Math.exp(scale.low) : scale.low)} ${unit}` }));
    return;
  }
  const back = key === "ratio" ? Math.exp : key === "logp" ? (v) => -v : (v) => v;
  const bar = el("i", { class: "gradient", style: { background: two
    ? `linear-gradient(90deg, ${tint(DOWN, 0.8)}, ${tint(DOWN, 0)}, ${tint(UP, 0)}, ${tint(UP, 0.8)})`
    : `linear-gradient(90deg, ${tint(rgb, 0.08)}, ${tint(rgb, 0.8)})` } });
  clear(legend, el("span", { text: plain(back(scale.low)) }), bar,
    el("span", { text: `${plain(back(scale.high))} ${unit}` }));
}

// ---- episodes -----------------------------------------------------------------------------------

const ENDS = { environment: "by the environment", turns: "all turns were used", tokens: "all tokens were used",
  length: "a turn reached its limit" };
const seconds = (x) => `${plain(x < 1 ? Number(x.toFixed(3)) : Number(x.toPrecision(3)))} s`;

// What was given and what the model said, in turn.
function turnNodes(s, key, scale) {
  let from = 0, turn = 0;
  return el("div", { class: "turns" }, ...s.parts.map((p) => {
    const pre = el("pre", {}), facts = [p.given ? "given" : `model, turn ${++turn}`, `${counted(p.tokens)} tokens`];
    if (finite(p.time_s)) facts.push(seconds(p.time_s));
    paint(pre, s, key, scale, p.text, from, from += p.tokens);
    return el("div", { class: p.given ? "turn given" : "turn" }, el("div", { class: "facts", text: facts.join(" · ") }),
      ...(p.errors ?? []).map((text) => el("div", { class: "fault", text: `tool error: ${text}` })), pre);
  }));
}

function episodeFacts({ turns, branch, branches, dropped_tokens: dropped, environment_s: tools, model_s: model, end }) {
  const facts = [`${plain(turns)} ${turns === 1 ? "turn" : "turns"}`, `branch ${plain(branch + 1)} of ${plain(branches)}`];
  if (dropped) facts.push(`${counted(dropped)} tokens in other branches`);
  if (finite(model)) facts.push(`model ${seconds(model)}`, `environment ${seconds(tools)}`);
  if (end) facts.push(`ended: ${ENDS[end] ?? end}`);
  return el("div", { class: "facts episode", text: facts.join(" · ") });
}

function card(s, g, key, scale) {
  const text = s.parts ? turnNodes(s, key, scale) : el("pre", { class: "text" });
  if (!s.parts) paint(text, s, key, scale);
  const node = el("article", { class: "card" });
  const put = (...parts) => node.append(...parts.filter(Boolean));
  const ok = s.outcome === "ok";
  const facts = [`${counted(s.tokens)} tokens`];
  if (finite(s.means?.advantage)) facts.push(`advantage ${signed(s.means.advantage)}`);
  if (finite(s.means?.entropy)) facts.push(`entropy ${plain(s.means.entropy)} nats`);
  if (s.error) facts.push(s.error);
  const parts = Object.entries(s.components ?? {}).map(([name, v]) => `${name} ${plain(v)}`);
  const widen = el("button", { class: "widen", title: "wide or narrow", "aria-label": "wide or narrow", text: "⤢",
    on: { click: () => node.classList.toggle("wide") } });
  put(
    el("header", {},
      el("b", { class: "reward", text: ok ? `reward ${plain(s.reward)}` : s.outcome,
                style: { "background-color": ok ? rewardTint(s.reward, g) : "transparent" } }),
      s.truncated ? el("span", { class: "badge", text: "truncated" }) : null,
      ok ? null : el("span", { class: "badge", text: "no verdict" }), widen),
    el("div", { class: "facts", text: facts.join(" · ") }), s.episode ? episodeFacts(s.episode) : null,
    parts.length ? el("div", { class: "facts", text: parts.join(" · ") }) : null, text);
  return node;
}

// ---- the list -----------------------------------------------------------------------------------

const ORDERS = {
  "newest step": (a, b) => b.step - a.step || a.group - b.group,
  "oldest step": (a, b) => a.step - b.step || a.group - b.group,
  "highest reward": (a, b) => down(factsOf(a).reward, factsOf(b).reward),
  "lowest reward": (a, b) => -down(factsOf(a).reward, factsOf(b).reward),
  "highest variance": (a, b) => down(factsOf(a).variance, factsOf(b).variance),
  "longest": (a, b) => down(factsOf(a).length, factsOf(b).length),
  "shortest": (a, b) => -down(factsOf(a).length, factsOf(b).length),
  "label": (a, b) => (a.label < b.label ? -1 : a.label > b.label ? 1 : a.step - b.step),
};
const down = (a, b) => (finite(b) ? b : -1e300) - (finite(a) ? a : -1e300);

function groupsSection() {
  const view = groupView();
  const list = el("div", { class: "list", role: "listbox", "aria-label": "groups" });
  const count = el("div", { class: "small" });
  const search = el("input", { type: "search", id: "search", placeholder: "search prompts and responses",
    "aria-label": "search prompts and responses" });
  const label = el("select", { id: "label", "aria-label": "label", on: { change: () => refresh() } });
  const kind = el("select", { id: "kind", "aria-label": "rewards", on: { change: () => refresh() } },
    ...["all rewards", "rewards vary", "rewards equal", "with truncated", "with tool errors", "without verdict"].map((x) => el("option", { value: x, text: x })));
  const order = el("select", { id: "order", "aria-label": "order", on: { change: () => refresh() } },
    ...Object.keys(ORDERS).map((x) => el("option", { value: x, text: x })));
  const only = el("input", { type: "checkbox", id: "only", on: { change: () => { state.only = only.checked; refresh(); } } });
  let found = [], shown = 0, chosen = null, timer = 0;
  search.addEventListener("input", () => { clearTimeout(timer); timer = setTimeout(() => refresh(), 120); });

  const kinds = {
    "rewards vary": (g) => factsOf(g).variance > 0,
    "rewards equal": (g) => factsOf(g).variance === 0,
    "with truncated": (g) => g.samples.some((s) => s.truncated || ["turns", "tokens", "length"].includes(s.episode?.end)),
    "with tool errors": (g) => g.samples.some((s) => s.parts?.some((p) => p.errors)),
    "without verdict": (g) => g.samples.some((s) => s.outcome !== "ok"),
  };

  function nearest() {
    const logged = [...new Set(current().groups.map((g) => g.step))];
    return logged.reduce((a, b) => (Math.abs(b - stepNow()) < Math.abs(a - stepNow()) ? b : a), logged[0]);
  }

  // Draws the list anew; the group on top is shown, or `wanted` where it is in the list.
  function refresh(wanted = null) {
    const run = current(), words = search.value.trim().toLowerCase();
    const step = state.only ? nearest() : null;
    found = run.groups.filter((g) => (step === null || g.step === step)
      && (!label.value || g.label === label.value)
      && (kinds[kind.value]?.(g) ?? true)
      && (!words || factsOf(g).text.includes(words)));
    found.sort(ORDERS[order.value]);
    const less = run.groups.length < run.logged ? `; the page holds ${run.groups.length} of ${run.logged.toLocaleString("en-US")} logged groups, evenly over the steps` : "";
    const where = step === null ? "" : step === stepNow() ? ` of step ${step}` : ` of step ${step}, the nearest logged one`;
    count.textContent = run.groups.length ? `${found.length} of ${run.groups.length} groups${where}${less}` : emptyReason(run);
    clear(list);
    shown = 0;
    more();
    choose(found.includes(wanted) ? wanted : found[0] ?? null);
  }

  function more() {
    list.querySelector(".more")?.remove();
    for (const g of found.slice(shown, shown + PER_PAGE)) list.append(row(g));
    shown = Math.min(found.length, shown + PER_PAGE);
    if (shown < found.length) {
      list.append(el("button", { class: "more", text: `${found.length - shown} more …`, on: { click: more } }));
    }
  }

  function row(g) {
    const { reward, length } = factsOf(g);
    const dots = el("span", { class: "dots" }, ...g.samples.slice(0, 32).map((s) =>
      el("i", { style: { "background-color": s.outcome === "ok" ? dotTint(s.reward) : "transparent" } })));
    g.row = el("button", { class: "item", role: "option", on: { click: () => choose(g) } },
      el("span", { class: "head" }, el("b", { text: g.label || "–" }), el("span", { class: "dim", text: `step ${g.step}` }),
        el("span", { class: "n", text: plain(reward) })),
      el("span", { class: "snippet", text: wordsOf(g.prompt).slice(0, 140) }),
      el("span", { class: "head" }, dots, el("span", { class: "dim", text: `${counted(length)} tokens` })));
    return g.row;
  }

  // of all samples of the run, so that rows can be compared
  function dotTint(reward) {
    const [low, high] = current().rewards;
    return finite(reward) ? tint(UP, high > low ? 0.12 + 0.83 * ((reward - low) / (high - low)) : 0.5) : "transparent";
  }

  function choose(g) {
    chosen?.row?.classList.remove("on");
    chosen = g;
    g?.row?.classList.add("on");
    view.show(g);
  }

  listeners.run.push(() => {
    const run = current(), rewards = run.groups.flatMap(known);
    run.rewards = [rewards.reduce((a, b) => Math.min(a, b), Infinity), rewards.reduce((a, b) => Math.max(a, b), -Infinity)];
    const labels = [...new Set(run.groups.map((g) => g.label))].sort();
    clear(label, el("option", { value: "", text: "all labels" }), ...labels.map((x) => el("option", { value: x, text: x || "no label" })));
    label.value = "";
    kind.value = run.groups.some(kinds["rewards vary"]) ? "rewards vary" : "all rewards";
    chosen = null;
    refresh();
  });
  listeners.step.push(() => state.only && refresh());
  listeners.group = (g) => { only.checked = state.only = false; search.value = ""; label.value = ""; kind.value = "all rewards"; refresh(g); };
  return section("groups", "Groups", "The samples that the run logged, first those of groups whose rewards vary: they teach. Blue is above the group's mean reward, orange below it.",
    el("div", { class: "bar" }, search, label, kind, el("label", { class: "field" }, el("span", { text: "Order" }), order),
      el("label", { class: "check" }, only, "only the slider's step")),
    count, el("div", { class: "browser" }, list, view.root));
}

function emptyReason(run) {
  if (run.stage !== "rl") return `The stage ${run.stage} samples nothing.`;
  return "This run has logged no samples (rollouts.jsonl is missing or empty; log.groups may be 0).";
}
