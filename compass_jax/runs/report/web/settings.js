// Every setting of the run, and the machine that it ran on.

function settingsSection() {
  const table = el("table", { class: "settings" }), machine = el("dl", { class: "machine" });
  const search = el("input", { type: "search", id: "setting", placeholder: "search settings", "aria-label": "search settings", on: { input: () => draw() } });
  const all = el("input", { type: "checkbox", id: "defaults", on: { change: () => draw() } });
  const count = el("span", { class: "small" });
  function draw() {
    const run = current(), words = search.value.trim().toLowerCase();
    const found = run.settings.filter(([name, value, changed]) => (all.checked || changed || words) && `${name} ${value}`.toLowerCase().includes(words));
    count.textContent = `${found.length} of ${run.settings.length} settings`;
    clear(table, ...found.map(([name, value, changed]) => el("tr", { class: changed ? "changed" : "" },
      el("td", { class: "name", text: name }), el("td", { class: "value", text: value }))));
  }
  listeners.run.push(() => {
    const run = current();
    clear(machine, ...run.machine.map(([name, value]) => el("div", {}, el("dt", { text: name }), el("dd", { text: value }))));
    draw();
  });
  return section("settings", "Settings and machine", "Settings that differ from their defaults; all of them are in config.json.",
    machine, el("div", { class: "bar" }, search, el("label", { class: "check" }, all, "with defaults"), count), table);
}
