"use strict";
// Charts under the pointer: values at the nearest point, and zoom. Without it they are still pictures.
const NS = "http://www.w3.org/2000/svg";

function write(value, percent) {
  if (percent) return `${(100 * value).toFixed(2)} %`;
  if (Math.abs(value) >= 1000) return Math.round(value).toLocaleString("en");
  return String(Number(value.toPrecision(4)));
}

function ticks(low, high, whole) {
  const least = (high - low) / 5, size = 10 ** Math.floor(Math.log10(least));
  let step = [1, 2, 5, 10].map(n => n * size).find(s => s >= least);
  if (whole) step = Math.max(1, Math.round(step));
  const places = [];
  for (let n = Math.ceil(low / step); n * step <= high; n++) places.push(n * step);
  return places;
}

function explore(svg, number) {
  const chart = JSON.parse(svg.dataset.chart), [left, top, width, height] = chart.box;
  const still = [...svg.children], figure = svg.parentNode;
  const make = (name, attributes, style, parent) => {
    const element = document.createElementNS(NS, name);
    for (const key in attributes) element.setAttribute(key, attributes[key]);
    Object.assign(element.style, style);
    return parent.appendChild(element);
  };
  const drawn = make("g", {}, {}, svg), over = make("g", {}, { pointerEvents: "none" }, svg);
  const said = figure.appendChild(document.createElement("div"));
  said.className = "readout";
  said.setAttribute("aria-live", "polite");
  said.hidden = true;
  const all = { x: [chart.x.low, chart.x.high], y: [chart.y.low, chart.y.high] };
  const places = [...new Set(chart.lines.flatMap(line => line.x))].sort((a, b) => a - b);
  let seen = all, at = null, from = null;

  const share = (axis, v) => {
    const f = chart[axis].log ? Math.log : n => n, [low, high] = seen[axis];
    return (f(v) - f(low)) / (f(high) - f(low));
  };
  const across = v => left + width * share("x", v), up = v => top + height * (1 - share("y", v));
  const within = v => v >= seen.x[0] && v <= seen.x[1];

  function show(x) {
    at = x;
    over.replaceChildren();
    said.hidden = x === null;
    if (x === null) return;
    make("path", { d: `M${across(x)} ${top}v${height}` }, { stroke: "var(--muted)" }, over);
    const name = `${chart.x.name} ${write(x)}${chart.x.unit}`;
    said.replaceChildren(Object.assign(document.createElement("b"), { textContent: name }));
    for (const line of chart.lines) {
      const i = line.x.findLastIndex(v => v <= x); // its own point, or its newest one there
      if (i < 0) continue;
      const dot = { cx: across(line.x[i]), cy: up(line.y[i]), r: 3.5 };
      if (within(line.x[i])) make("circle", dot, { fill: line.colour, stroke: "var(--paper)" }, over);
      const row = said.appendChild(document.createElement("span"));
      row.textContent = `${line.label} ${write(line.y[i], chart.y.percent)}`;
      row.style.setProperty("--key", line.colour);
    }
    said.classList.toggle("left", share("x", x) > 0.5);
  }

  function zoom(low, high) {
    const whole = low <= all.x[0] && high >= all.x[1];
    const values = chart.lines.flatMap(line => line.y.filter((_, i) => line.x[i] >= low && line.x[i] <= high));
    if (!whole && !values.length) return;
    seen = all;
    if (!whole) {
      const [least, most] = [Math.min(...values), Math.max(...values)];
      const room = chart.y.log ? 0 : (most - least || Math.abs(most) || 1) * 0.06;
      seen = { x: [low, high], y: [least - room, most === least && chart.y.log ? most * 1.1 : most + room] };
    }
    for (const element of still) element.style.display = whole ? "" : "none";
    drawn.replaceChildren();
    if (!whole) draw();
    show(null);
  }

  function draw() {
    const label = (text, x, y, anchor) => {
      make("text", { x, y, "text-anchor": anchor }, { fill: "var(--muted)" }, drawn).textContent = text;
    };
    for (const v of ticks(...seen.y)) {
      make("path", { d: `M${left} ${up(v)}h${width}` }, { stroke: "var(--line)" }, drawn);
      label(write(v, chart.y.percent), left - 6, up(v) + 4, "end");
    }
    for (const v of ticks(...seen.x, chart.x.whole)) label(write(v), across(v), top + height + 17, "middle");
    label(chart.y.name, 0, top - 9, "start");
    label(chart.x.name, left + width, top + height + 32, "end");
    const clip = make("clipPath", { id: `zoom-${number}` }, {}, drawn);
    make("rect", { x: left, y: top - 4, width, height: height + 8 }, {}, clip);
    for (const line of chart.lines) {
      const points = line.x.map((x, i) => `${across(x).toFixed(1)},${up(line.y[i]).toFixed(1)}`).join(" ");
      const style = { fill: "none", stroke: line.colour, strokeWidth: 2 };
      make("polyline", { points, "clip-path": `url(#zoom-${number})` }, style, drawn);
    }
  }

  // The place across that an event is at, and the nearest one that has a point.
  const place = event => {
    const frame = svg.getBoundingClientRect(), [low, high] = seen.x;
    const x = (event.clientX - frame.left) * svg.viewBox.baseVal.width / frame.width;
    const part = Math.min(Math.max((x - left) / width, 0), 1);
    return chart.x.log ? low * (high / low) ** part : low + part * (high - low);
  };
  const nearest = v => {
    const closer = (a, b) => a === null || Math.abs(b - v) < Math.abs(a - v) ? b : a;
    return places.filter(within).reduce(closer, null);
  };

  svg.addEventListener("pointermove", event => {
    show(nearest(place(event)));
    if (from === null) return;
    const [a, b] = [from, place(event)].map(across);
    const area = { x: Math.min(a, b), y: top, width: Math.abs(a - b), height };
    make("rect", area, { fill: "var(--accent)", opacity: 0.15 }, over);
  });
  svg.addEventListener("pointerleave", () => { from = null; show(null); });
  svg.addEventListener("pointerdown", event => { if (event.pointerType === "mouse") from = place(event); });
  svg.addEventListener("pointerup", event => {
    const ends = from === null ? [] : [from, place(event)].sort((a, b) => a - b);
    from = null;
    if (ends.length && across(ends[1]) - across(ends[0]) > 8) zoom(...ends);
  });
  svg.addEventListener("dblclick", () => zoom(...all.x));
  svg.addEventListener("keydown", event => {
    const there = places.filter(within), i = there.indexOf(at), [low, high] = seen.x;
    const middle = at ?? (low + high) / 2, factor = { "+": 0.5, "=": 0.5, "-": 2 }[event.key];
    if (event.key === "ArrowRight" && there.length) show(there[Math.min(i + 1, there.length - 1)]);
    else if (event.key === "ArrowLeft" && there.length) show(there[i < 0 ? there.length - 1 : Math.max(i - 1, 0)]);
    else if (event.key === "Escape") zoom(...all.x);
    else if (factor) {
      zoom(Math.max(all.x[0], middle - (middle - low) * factor), Math.min(all.x[1], middle + (high - middle) * factor));
      if (at === null && within(middle)) show(nearest(middle));
    } else return;
    event.preventDefault();
  });
  svg.tabIndex = 0;
}

document.querySelectorAll("svg[data-chart]").forEach(explore);
for (const hint of document.querySelectorAll(".hint")) hint.hidden = false;
