// Rollout against training: how far their log-probs are apart, whether the replay holds, and the
// tokens that differ most.

// The tokens with the largest difference: [size, group, sample, token].
function farthest(groups, most) {
  const all = [];
  for (const g of groups) {
    for (const s of g.samples) {
      if (!s.values || s.values.logp_diff === undefined) continue;
      for (let i = 0; i < s.values.text.length; i++) {
        const v = valueAt(s.values.logp_diff, i);
        if (finite(v)) all.push([Math.abs(v), g, s, i]);
      }
    }
  }
  const sizes = all.map((x) => x[0]);
  all.sort((a, b) => b[0] - a[0]);
  return { sizes, top: all.slice(0, most) };
}

// Counts per power of ten.
function histogram(sizes) {
  const bins = new Map();
  for (const v of sizes) {
    const power = v === 0 ? -Infinity : Math.max(-12, Math.floor(Math.log10(v)));
    bins.set(power, (bins.get(power) ?? 0) + 1);
  }
  const keys = [...bins.keys()].sort((a, b) => a - b);
  const most = Math.max(...bins.values());
  return el("table", { class: "histogram" }, ...keys.map((key) => {
    const n = bins.get(key);
    return el("tr", {}, el("td", { class: "n", text: key === -Infinity ? "equal" : `1e${key} to 1e${key + 1}` }),
      el("td", { class: "wide" }, el("i", { class: "fill", style: { width: `${(100 * n) / most}%` } })),
      el("td", { class: "n", text: n.toLocaleString("en-US") }));
  }));
}

function pieceOf(sample, i) {
  const head = Array.from(wholeText(sample));
  const start = sample.values.text.slice(0, i).reduce((a, b) => a + b, 0);
  return JSON.stringify(head.slice(start, start + sample.values.text[i]).join("")).slice(1, -1) || "(no text)";
}

function mismatchSection() {
  const grid = el("div", { class: "charts" });
  const tokens = el("div", {});
  let charts = [];
  listeners.axis.push(() => {
    charts = panelCharts(current(), panelsOf("mismatch"));
    clear(grid, ...charts.map((c) => c.node));
    if (!charts.length) clear(grid, el("p", { class: "empty", text: "This run logged no such metrics." }));
  });
  listeners.run.push(() => {
    const run = current();
    const { sizes, top } = farthest(run.groups, 12);
    if (!sizes.length) {
      clear(tokens, el("p", { class: "empty", text: run.has_tokens
        ? "No numbers of single tokens have room on this page."
        : "This run logged no numbers of single tokens (tokens.jsonl; log.tokens in the configuration)." }));
      return;
    }
    const rows = top.map(([, g, s, i]) => el("tr", { class: "link", on: { click: () => {
      listeners.group(g);
      document.getElementById("groups").scrollIntoView();
    } } }, el("td", { class: "token", text: pieceOf(s, i) }), el("td", { class: "n", text: signed(valueAt(s.values.logp_diff, i)) }),
    el("td", { class: "n", text: plain(Math.exp(valueAt(s.values.logp, i))) }),
    el("td", { class: "n", text: plain(Math.exp(valueAt(s.values.logp, i) - valueAt(s.values.logp_diff, i))) }),
    el("td", { class: "n", text: `step ${g.step}` }), el("td", { text: g.label })));
    clear(tokens, el("div", { class: "two" },
      el("div", {}, el("h3", { text: `|log-prob difference| of ${sizes.length.toLocaleString("en-US")} logged tokens, nats` }), histogram(sizes)),
      el("div", {}, el("h3", { text: "Tokens that differ most" }), el("table", {}, el("tr", {},
        ...["token", "difference, nats", "p in training", "p in rollout", "", "label"].map((t, i) =>
          el("th", { class: i > 0 && i < 5 ? "n" : "", text: t }))), ...rows))));
  });
  listeners.step.push(() => charts.forEach((c) => c.mark(xNow())));
  return section("mismatch", "Rollout, training and replay",
    "One policy is computed twice: by the rollout, and by the training before its first update.", grid, tokens);
}
