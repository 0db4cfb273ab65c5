// Line charts and stacked shares as SVG, with a mark at the chosen step and a reading on hover.

const W = 400;
const H = 190;
const PAD = { left: 52, right: 10, top: 10, bottom: 24 };

function ticksOf(low, high, wanted) {
  const span = high - low || Math.abs(high) || 1;
  const power = 10 ** Math.floor(Math.log10(span / wanted));
  const step = [1, 2, 5, 10].map((x) => x * power).find((x) => span / x <= wanted);
  const ticks = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) ticks.push(i * step);
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

function rangeOf(lines, scale) {
  const all = lines.flatMap((l) => l.ys.filter(finite));
  if (!all.length) return [0, 1];
  let low = all.reduce((a, b) => Math.min(a, b)), high = all.reduce((a, b) => Math.max(a, b));
  if (scale === "share") return [0, high > 0.35 ? Math.max(1, high) : high * 1.15 || 1];
  if (scale === "log") return [low / 1.3, high * 1.3];
  if (low === high) return low === 0 ? [0, 1] : [low - Math.abs(low) * 0.5, high + Math.abs(high) * 0.5];
  if (low > 0 && low < 0.35 * high) low = 0;
  const room = (high - low) * 0.06;
  return [low === 0 ? 0 : low - room, high + room];
}

// A chart of lines {name, colour, xs, ys}. `scale`: linear, log, share or stacked. `format` words a
// value, `xname` and `xformat` the x axis. `pick(i)` is called for a click near point i of the first
// line; `mark(x)` of the result moves the mark to x (null: none).
function chart({ title, unit, lines, scale = "linear", format = plain, xname = "step",
                 xformat = plain, pick = null, note = "" }) {
  const stacked = scale === "stacked";
  if (scale === "log" && lines.some((l) => l.ys.some((y) => finite(y) && y <= 0))) scale = "linear";
  const xsAll = lines.flatMap((l) => [l.xs[0], l.xs[l.xs.length - 1]]).filter(finite);
  const x0 = Math.min(...xsAll), x1 = Math.max(...xsAll, x0 + 1);
  const [low, high] = stacked ? [0, 1] : rangeOf(lines, scale);
  const bend = scale === "log" ? Math.log10 : (v) => v;
  const x = (v) => PAD.left + ((v - x0) / (x1 - x0)) * (W - PAD.left - PAD.right);
  const y = (v) => {
    const part = (bend(v) - bend(low)) / (bend(high) - bend(low));
    return H - PAD.bottom - Math.max(-0.02, Math.min(1.02, part)) * (H - PAD.top - PAD.bottom);
  };
  const root = svg("svg", { viewBox: `0 0 ${W} ${H}`, role: "img", "aria-label": `${title}, ${unit}` });
  const shares = stacked || scale === "share";
  const ticks = scale === "log" ? logTicks(low, high) : ticksOf(low, high, 4);
  for (const t of ticks) {
    root.append(
      svg("line", { class: "grid", x1: PAD.left, x2: W - PAD.right, y1: y(t), y2: y(t) }),
      svg("text", { class: "tick", x: PAD.left - 6, y: y(t) + 3.5, "text-anchor": "end",
                    text: shares ? percent(t) : scale === "log" ? plain(t) : plain(Number(t.toPrecision(6))) }));
  }
  for (const t of ticksOf(x0, x1, 5)) {
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
      rows.push([line.name, word(line.ys[i]), line.colour]);
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
  const node = el("figure", { class: "chart" },
    el("figcaption", {}, el("b", { text: title }), el("span", { class: "unit", text: unit })),
    root, legend, note ? el("div", { class: "note", text: note }) : null);
  return { node, mark };
}

function drawLine(root, line, x, y) {
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
