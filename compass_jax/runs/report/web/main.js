// The page: a head with the run and its settings, the step slider, and the sections.

function header() {
  const run = el("select", { id: "run", "aria-label": "run", on: { change: (e) => chooseRun(Number(e.target.value)) } },
    ...data.runs.map((r, i) => el("option", { value: i, text: r.name })));
  const facts = el("dl", {}), notes = el("ul", { class: "notes" }), progress = el("p", { class: "small" });
  listeners.run.push(() => {
    const r = current();
    clear(facts, ...r.facts.map(([name, words]) => el("div", {}, el("dt", { text: name }), el("dd", { text: words }))));
    clear(notes, ...r.notes.map((text) => el("li", { text })));
    const spent = r.tokens[r.tokens.length - 1];
    const of = r.wanted ? ` of ${r.wanted.toLocaleString("en-US")}` : "";
    const going = r.wanted && r.last < r.wanted ? ": the run is going on, or was stopped" : "";
    const each = r.curves.every > 1 ? `; a point of a curve is the mean of ${r.curves.every} steps` : "";
    progress.textContent = `Step ${r.last.toLocaleString("en-US")}${of}${going}${finite(spent) ? `; ${counted(spent)} tokens generated` : ""}${each}. `
      + `${r.path}, as of ${data.made}.`;
  });
  return el("header", { class: "top" },
    el("div", {}, el("h1", { text: "compass report" }), data.runs.length > 1
      ? el("label", { class: "field" }, el("span", { text: "Run" }), run) : el("b", { text: data.runs[0].name })),
    facts, progress, notes);
}

function stepBar() {
  const slider = el("input", { type: "range", id: "step", min: 0, step: 1, "aria-label": "step",
    on: { input: () => chooseStep(Number(slider.value)) } });
  const shown = el("output", { id: "stepnow" });
  const names = [["accuracy", "Accuracy"], ["curves", "Curves"], ["waste", "Tokens"], ["groups", "Groups"],
    ["answers", "Answers"], ["mismatch", "Mismatch"], ["settings", "Settings"],
    ...(data.runs.length > 1 ? [["compare", "Comparison"]] : [])];
  const axis = el("select", { id: "axis", "aria-label": "x axis of the curves", on: { change: () => chooseAxis(axis.value) } });
  listeners.run.push(() => {
    const axes = axesOf(current());
    clear(axis, ...Object.entries(axes).map(([value, { title }]) => el("option", { value, text: title === "step" ? "steps" : title })));
    if (!axes[state.axis]) state.axis = "step";
    axis.value = state.axis;
  });
  listeners.run.push(() => { slider.max = steps().length - 1; });
  listeners.step.push(() => {
    slider.value = state.at;
    const share = current().curves.metrics["reward/mean"]?.v[state.at];
    shown.textContent = `step ${stepNow().toLocaleString("en-US")}${finite(share) ? `, reward ${plain(share)}` : ""}`;
  });
  return el("nav", {}, ...names.map(([id, name]) => el("a", { href: `#${id}`, text: name })),
    el("label", { class: "field" }, el("span", { text: "x axis" }), axis),
    el("label", { class: "slider" }, el("span", { text: "Step" }), slider, shown));
}

document.getElementById("page").append(header(), stepBar(), overviewSection(), curvesSection(), funnelSection(),
  groupsSection(), answersSection(), mismatchSection(), settingsSection(), compareSection(), tip);
chooseRun(0);
matchMedia("(max-width: 900px)").addEventListener("change", () => chooseAxis(state.axis));
if (data.again_s) setTimeout(() => location.reload(), 1000 * data.again_s);
document.documentElement.dataset.ready = Math.round(performance.now());
