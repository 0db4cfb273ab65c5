// The evaluation's prompts with their answers, before the first step and after the last one.

const rightOf = (samples) => {
  const judged = (samples ?? []).filter((s) => s.outcome === "ok" && finite(s.reward));
  return judged.length ? mean(judged.map((s) => s.reward)) : NaN;
};

const CHANGES = {
  "all prompts": () => true,
  "better at the end": (a) => rightOf(a.end) > rightOf(a.start),
  "worse at the end": (a) => rightOf(a.end) < rightOf(a.start),
  "never right": (a) => !(Math.max(...(a.end ?? a.start).map((s) => s.reward ?? 0)) > 0),
};
const ANSWERS_SHOWN = 25;

function answersOf(title, samples) {
  if (!samples) return null;
  return el("div", {}, el("h3", { text: title }), ...samples.map((s, i) => {
    const verdict = s.outcome === "ok" ? `reward ${plain(s.reward)}` : [s.outcome, s.error].filter(Boolean).join(": ");
    const kind = i === samples.length - 1 ? "greedy" : `sample ${i + 1}`;
    return el("div", { class: "answer" }, el("span", { class: "facts", text: `${kind} · ${verdict} · ${counted(s.tokens)} tokens${s.truncated ? " · truncated" : ""}` }),
      s.episode ? episodeFacts(s.episode) : null,
      s.parts ? turnNodes(s) : el("pre", {}, ...textNodes(s.response)));
  }));
}

function answerRow(a) {
  const scores = [a.start && `start ${plain(rightOf(a.start))}`, a.end && `end ${plain(rightOf(a.end))}`].filter(Boolean).join(" → ");
  const row = el("details", { class: "asked" }, el("summary", {}, el("b", { text: a.label || "–" }), " ",
    el("span", { class: "dim", text: `${a.set} · mean reward ${scores}` }), el("span", { class: "snippet", text: wordsOf(a.prompt).slice(0, 160) })));
  row.addEventListener("toggle", () => {
    if (!row.open || row.dataset.drawn) return;
    row.dataset.drawn = "1";
    row.append(...[el("pre", { class: "prompt" }, ...textNodes(a.prompt)),
      wordsOf(a.answer) ? el("div", { class: "truth" }, el("span", { class: "dim", text: "reference " }), ...textNodes(a.answer)) : null,
      el("div", { class: "two even" }, answersOf("before the first step", a.start), answersOf("after the last step", a.end))].filter(Boolean));
  });
  return row;
}

function answersSection() {
  const list = el("div", {}), count = el("div", { class: "small" });
  const search = el("input", { type: "search", id: "asked", placeholder: "search prompts and answers", "aria-label": "search prompts and answers" });
  const change = el("select", { id: "change", "aria-label": "change of the reward", on: { change: () => refresh() } },
    ...Object.keys(CHANGES).map((x) => el("option", { value: x, text: x })));
  const label = el("select", { "aria-label": "label of the prompt", on: { change: () => refresh() } });
  const bar = el("div", { class: "bar" }, search, label, change);
  let shown = ANSWERS_SHOWN, timer = 0;
  search.addEventListener("input", () => { clearTimeout(timer); timer = setTimeout(() => refresh(), 120); });
  const textOf = (a) => (a.text ??= [a.label, wordsOf(a.prompt), wordsOf(a.answer), ...[...(a.start ?? []), ...(a.end ?? [])].map(wordsIn)].join("\n").toLowerCase());

  function refresh(more = false) {
    const run = current(), words = search.value.trim().toLowerCase();
    shown = more ? shown + ANSWERS_SHOWN : ANSWERS_SHOWN;
    const found = run.answers.filter((a) => (!label.value || a.label === label.value) && CHANGES[change.value](a) && (!words || textOf(a).includes(words)));
    const less = run.answers.length < run.answered ? `; the page holds ${run.answers.length} of ${run.answered.toLocaleString("en-US")} evaluated prompts` : "";
    count.textContent = `${found.length} of ${run.answers.length} prompts${less}`;
    clear(list, ...found.slice(0, shown).map(answerRow),
      found.length > shown ? el("button", { text: `${found.length - shown} more …`, on: { click: () => refresh(true) } }) : null);
  }

  listeners.run.push(() => {
    const run = current(), labels = [...new Set(run.answers.map((a) => a.label))].sort();
    clear(label, el("option", { value: "", text: "all labels" }), ...labels.map((x) => el("option", { value: x, text: x || "no label" })));
    bar.hidden = !run.answers.length;
    if (run.answers.length) refresh();
    else {
      count.textContent = "";
      clear(list, el("p", { class: "empty", text: "No evaluation's answers lie in the run's directory (evaluation_start/, evaluation/)." }));
    }
  });
  return section("answers", "Evaluation answers", "Held-out prompts with the sampled answers and the greedy one; a click opens a prompt.", bar, count, list);
}
