// Line charts and stacked shares as SVG, with a mark at the chosen step and a reading on hover.

const CARD = { W: 400, H: 190 }, WIDE = { W: 820, H: 330 }, SMALL = { W: 250, H: 120 };
const PAD = { left: 52, right: 10, top: 10, bottom: 24 };

function ticksOf(low, high, wanted) {
  const span = high - low || Math.abs(high) || 1;
  const power = 10 ** Math.floor(Math.log10(span / wanted));
  const step = [1, 2, 5, 10].map((x) => x * power).find((x) => span / x <= wanted);
  const ticks = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) ticks.push(i * step + 0); // no -0
  return ticks;
}

function logTicks(low, high) {
  const ticks = [];
  const from = Math.floor(Math.log10(low)), to = Math.ceil(Math.log10(high));
  const every = Math.max(1, Math.ceil((to - from) / 4));
  const parts = high / low < 30 ? [1, 2, 5] : [1];
  for (let e = from; e <= to; e += every) ticks.push(...parts.map((x) => x * 10 ** e));
  return ticks.filter((x) => x >= low * 0.999 && x <= high * 1.001);
}

// Centred mean over `window` points; gaps stay gaps.
function smoothed(ys, window) {
  const half = window >> 1;
  return ys.map((y, i) => {
    if (!finite(y)) return null;
    const near = ys.slice(Math.max(0, i - half), i + half + 1).filter(finite);
    return mean(near);
  });
}

// Pieces of a line between gaps; a metric that few steps have is joined over them.
function pathOf(xs, ys, x, y) {
  const dense = ys.filter(finite).length * 2 > ys.length;
  let path = "", open = false;
  ys.forEach((value, i) => {
    if (!finite(value)) {
      if (dense) open = false;
      return;
    }
    path += `${open ? "L" : "M"}${x(xs[i]).toFixed(1)} ${y(value).toFixed(1)}`;
    open = true;
  });
  return path;
}

// The y range without a few values far above all others, and a note of them; null where there are none.
// The first step of a run compiles: at full height it would press all others flat.
function clippedRange(lines) {
  const all = lines.flatMap((l) => l.ys.filter(finite)).sort((a, b) => a - b);
  const most = all[all.length - 1], usual = all[Math.floor(0.9 * (all.length - 1))];
  if (all.length < 8 || !(most > 2.5 * usual)) return null;
  const high = 1.5 * usual, above = all.filter((v) => v > high).length;
  return { range: [0, high], note: `${above} value${above > 1 ? "s" : ""} above the axis, up to ${plain(most)}` };
}

function rangeOf(lines, scale) {
  const all = lines.flatMap((l) => [...l.ys, ...(l.low ?? []), ...(l.high ?? [])].filter(finite));
  if (!all.length) return [0, 1];
  let low = all.reduce((a, b) => Math.min(a, b)), high = all.reduce((a, b) => Math.max(a, b));
  if (scale === "share") return [0, high > 0.35 ? Math.max(1, high) : high * 1.15 || 1];
  if (scale === "log") return [low / 1.3, high * 1.3];
  if (low === high) return low === 0 ? [0, 1] : [low - Math.abs(low) * 0.5, high + Math.abs(high) * 0.5];
  if (low > 0 && low < 0.35 * high) low = 0;
  const room = (high - low) * 0.06;
  return [low === 0 ? 0 : low - room, high + room];
}

// A chart of lines {name, colour, xs, ys, and low and high where they have intervals}. `scale`: linear,
// log, share, stacked or time (far values are cut off). `format` words a value, `xname` and `xformat` the
// x axis; `small` draws one of several that share the y axis `range`. `pick(x)` is called for a click at x;
// `mark(x)` of the result moves the mark to x (null: none).
function chart({ title, unit, lines, scale = "linear", format = plain, xname = "step",
                 xformat = plain, pick = null, note = "", wide = false, small = false, range = null }) {
  const { W, H } = small ? SMALL : wide && window.innerWidth > 900 ? WIDE : CARD;
  const stacked = scale === "stacked", cut = scale === "time" ? clippedRange(lines) : null;
  if (scale === "log" && lines.some((l) => l.ys.some((y) => finite(y) && y <= 0))) scale = "linear";
  const xsAll = lines.flatMap((l) => [l.xs[0], l.xs[l.xs.length - 1]]).filter(finite);
  const x0 = Math.min(...xsAll), x1 = Math.max(...xsAll, x0 + (xname === "step" ? 1 : 1e-9));
  const [low, high] = stacked ? [0, 1] : range ?? cut?.range ?? rangeOf(lines, scale);
  const bend = scale === "log" ? Math.log10 : (v) => v;
  const x = (v) => PAD.left + ((v - x0) / (x1 - x0)) * (W - PAD.left - PAD.right);
  const y = (v) => {
    const part = (bend(v) - bend(low)) / (bend(high) - bend(low));
    return H - PAD.bottom - Math.max(-0.02, Math.min(1.02, part)) * (H - PAD.top - PAD.bottom);
  };
  const root = svg("svg", { viewBox: `0 0 ${W} ${H}`, role: "img", "aria-label": `${title}, ${unit}` });
  const shares = stacked || scale === "share";
  const ticks = scale === "log" ? logTicks(low, high) : ticksOf(low, high, small ? 2 : 4);
  for (const t of ticks) {
    root.append(
      svg("line", { class: "grid", x1: PAD.left, x2: W - PAD.right, y1: y(t), y2: y(t) }),
      svg("text", { class: "tick", x: PAD.left - 6, y: y(t) + 3.5, "text-anchor": "end",
                    text: shares ? percent(t) : scale === "log" ? plain(t) : plain(Number(t.toPrecision(6))) }));
  }
  for (const t of ticksOf(x0, x1, W > 400 ? 9 : small ? 3 : 5)) {
    if (xname === "step" && !Number.isInteger(t)) continue;
    root.append(svg("text", { class: "tick", x: x(t), y: H - 7, "text-anchor": "middle", text: xformat(t) }));
  }
  if (stacked) stack(root, lines, x, y);
  else for (const line of lines) drawLine(root, line, x, y);
  const cursor = svg("line", { class: "cursor", y1: PAD.top, y2: H - PAD.bottom, x1: -9, x2: -9 });
  root.append(cursor);
  const readings = lines.map((line) => el("b", { text: "" }));
  const legend = el("div", { class: "legend" }, ...lines.map((line, i) =>
    el("span", { title: line.said }, el("i", { class: "swatch", style: { background: line.colour } }),
      el("span", { text: line.name }), readings[i])));
  const nearest = (line, at) => {
    let best = -1;
    line.xs.forEach((v, i) => {
      if (finite(line.ys[i]) && (best < 0 || Math.abs(v - at) < Math.abs(line.xs[best] - at))) best = i;
    });
    return best;
  };
  const word = (v) => (shares ? percent(v) : format(v));
  const place = (event) => {
    const box = root.getBoundingClientRect();
    const px = ((event.clientX - box.left) / box.width) * W;
    return x0 + ((px - PAD.left) / (W - PAD.left - PAD.right)) * (x1 - x0);
  };
  root.addEventListener("mousemove", (event) => {
    const rows = [];
    for (const line of lines) {
      const i = nearest(line, place(event));
      if (i < 0) continue;
      if (!rows.length) rows.push([`${xname} ${xformat(line.xs[i])}`, ""]);
      const between = finite(line.low?.[i]) ? ` (${word(line.low[i])} to ${word(line.high[i])})` : "";
      rows.push([line.name, word(line.ys[i]) + between, line.colour]);
    }
    if (rows.length) showTip(event, rows);
  });
  root.addEventListener("mouseleave", hideTip);
  if (pick) root.addEventListener("click", (event) => pick(place(event)));
  const mark = (at) => {
    const gone = at === null || at === undefined;
    cursor.setAttribute("x1", gone ? -9 : x(at));
    cursor.setAttribute("x2", gone ? -9 : x(at));
    lines.forEach((line, i) => {
      const near = gone ? -1 : nearest(line, at);
      readings[i].textContent = near < 0 ? "" : word(line.ys[near]);
    });
  };
  const notes = [note, cut?.note].filter(Boolean).join("; ");
  const node = el("figure", { class: small ? "chart small" : wide ? "chart wide" : "chart" },
    el("figcaption", {}, el("b", { text: title }), el("span", { class: "unit", text: unit })),
    root, legend, notes ? el("div", { class: "note", text: notes }) : null);
  return { node, mark };
}

// The interval of each point of a line, as an area behind it.
function drawBand(root, line, x, y) {
  const at = line.ys.map((_, i) => i).filter((i) => finite(line.low[i]) && finite(line.high[i]));
  const edge = (ys) => at.map((i) => `${x(line.xs[i]).toFixed(1)} ${y(ys[i]).toFixed(1)}`);
  root.append(svg("path", { class: "band", d: `M${[...edge(line.high), ...edge(line.low).reverse()].join("L")}Z`,
    style: { fill: line.colour, stroke: line.colour } }));
}

function drawLine(root, line, x, y) {
  if (line.low) drawBand(root, line, x, y);
  const count = line.ys.filter(finite).length;
  const window = Math.floor(count / 20);
  const draw = (ys, kind) => root.append(svg("path", {
    class: kind, d: pathOf(line.xs, ys, x, y), style: { stroke: line.colour },
    "stroke-dasharray": line.dash }));
  if (window > 1 && count * 2 > line.ys.length) {
    draw(line.ys, "line faint");
    draw(smoothed(line.ys, window), "line");
  } else {
    draw(line.ys, "line");
    if (count <= 30) {
      line.ys.forEach((v, i) => finite(v) && root.append(
        svg("circle", { cx: x(line.xs[i]), cy: y(v), r: 2.2, style: { fill: line.colour } })));
    }
  }
}

// Shares that sum to one, the first at the bottom.
function stack(root, lines, x, y) {
  const xs = lines[0].xs;
  const window = Math.max(1, Math.floor(xs.length / 20));
  let floor = xs.map(() => 0);
  for (const line of lines) {
    const ys = smoothed(line.ys.map((v) => v ?? 0), window);
    const top = floor.map((v, i) => v + ys[i]);
    const up = xs.map((v, i) => `${x(v).toFixed(1)} ${y(top[i]).toFixed(1)}`);
    const down = xs.map((v, i) => `${x(v).toFixed(1)} ${y(floor[i]).toFixed(1)}`).reverse();
    root.append(svg("path", { class: "area", d: `M${[...up, ...down].join("L")}Z`, style: { fill: line.colour } }));
    floor = top;
  }
}

// Distributions over the steps, darker where more of a column's values lie. `map` is the page's heat map.
function heatChart({ title, unit, map, run, pick }) {
  const { W, H } = CARD, { title: xname, format } = axisOf(run);
  const ends = map.steps.map((step) => onAxis(run, step));
  const x0 = xname === "step" ? map.steps[0] - 1 : 0, x1 = Math.max(ends[ends.length - 1], x0 + 1e-9);
  const rows = map.cells[0].length, span = map.high - map.low || 1;
  const x = (v) => PAD.left + ((v - x0) / (x1 - x0)) * (W - PAD.left - PAD.right);
  const y = (v) => H - PAD.bottom - ((v - map.low) / span) * (H - PAD.top - PAD.bottom);
  const root = svg("svg", { viewBox: `0 0 ${W} ${H}`, role: "img", "aria-label": `${title}, ${unit}` });
  for (const t of ticksOf(map.low, map.low + span, 4)) {
    root.append(svg("text", { class: "tick", x: PAD.left - 6, y: y(t) + 3.5, "text-anchor": "end", text: plain(Number(t.toPrecision(6))) }));
  }
  for (const t of ticksOf(x0, x1, 5)) {
    if (xname === "step" && !Number.isInteger(t)) continue;
    root.append(svg("text", { class: "tick", x: x(t), y: H - 7, "text-anchor": "middle", text: format(t) }));
  }
  const words = (row) => (map.high > map.low
    ? `${plain(map.low + (row * span) / rows)} to ${plain(map.low + ((row + 1) * span) / rows)}` : plain(map.low));
  map.cells.forEach((cells, column) => {
    const left = x(column ? ends[column - 1] : x0), right = x(ends[column]);
    cells.forEach((share, row) => {
      if (!share) return;
      const bottom = y(map.low + (row * span) / rows), top = y(map.low + ((row + 1) * span) / rows);
      root.append(svg("rect", { x: left, y: top, width: Math.max(right - left - 0.5, 0.5), height: Math.max(bottom - top - 0.5, 0.5),
        style: { fill: BLUE, opacity: 0.08 + 0.92 * Math.sqrt(share) },
        on: { mousemove: (e) => showTip(e, [[`step ${map.steps[column]}`, ""], [words(row), percent(share), BLUE]]), mouseleave: hideTip } }));
    });
  });
  const cursor = svg("line", { class: "cursor", y1: PAD.top, y2: H - PAD.bottom, x1: -9, x2: -9 });
  root.append(cursor);
  root.addEventListener("click", (event) => {
    const box = root.getBoundingClientRect();
    const px = ((event.clientX - box.left) / box.width) * W;
    pick(x0 + ((px - PAD.left) / (W - PAD.left - PAD.right)) * (x1 - x0));
  });
  const mark = (at) => { for (const end of ["x1", "x2"]) cursor.setAttribute(end, finite(at) ? x(at) : -9); };
  const node = el("figure", { class: "chart" },
    el("figcaption", {}, el("b", { text: title }), el("span", { class: "unit", text: unit })), root,
    el("div", { class: "note", text: "the darker, the more of a step's samples" }));
  return { node, mark };
}

// Colours and dashes of lines whose number is not known beforehand.
const BLUE = "var(--blue)", ORANGE = "var(--orange)", GREEN = "var(--green)";
const RED = "var(--red)", SKY = "var(--sky)", GREY = "var(--grey)", PURPLE = "var(--purple)";
const SHADES = [BLUE, ORANGE, GREEN, PURPLE, RED, SKY, "var(--slate2)"];
const DASHES = [null, "7 4", "2 3"];
const shadeOf = (i) => SHADES[i % SHADES.length];
const dashOf = (i) => DASHES[Math.floor(i / SHADES.length) % DASHES.length];
