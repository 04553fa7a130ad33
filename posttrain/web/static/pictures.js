// Draws the pictures of `posttrain.web.picture`. One function a kind; each returns an element. What draws is SVG, so that
// text stays sharp and colours follow the theme; curves are uPlot's. Nothing here knows what a picture means.
"use strict";

const Pictures = (() => {
  const NS = "http://www.w3.org/2000/svg";
  const TONES = ["one", "two", "three", "four"];

  function svg(name, attributes = {}, ...inside) {
    const e = document.createElementNS(NS, name);
    for (const [k, v] of Object.entries(attributes)) if (v !== null && v !== undefined) e.setAttribute(k, v);
    for (const x of inside) e.append(x);
    return e;
  }

  function html(name, attributes = {}, ...inside) {
    const e = document.createElement(name);
    for (const [k, v] of Object.entries(attributes)) {
      if (v === true) e.setAttribute(k, "");
      else if (v !== null && v !== undefined && v !== false) e.setAttribute(k, v);
    }
    for (const x of inside) e.append(x);
    return e;
  }

  function short(x) {
    if (x === null || x === undefined) return "";
    const size = Math.abs(x);
    if (size >= 1e15) return x.toExponential(1);
    if (size >= 1e3) return Math.round(x).toLocaleString("en");
    if (size !== 0 && size < 1e-3) return x.toExponential(0);
    return String(Number(x.toPrecision(3)));
  }

  // Round ends and steps for an axis: at most `most` steps of 1, 2 or 5 times a power of ten.
  function ticks(low, high, most = 5) {
    if (!(high > low)) high = low + 1;
    const raw = (high - low) / most, power = 10 ** Math.floor(Math.log10(raw));
    const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= raw * 0.999);
    const from = Math.floor(low / step + 1e-9) * step, out = [];
    for (let t = from; t < high + step * 0.999; t += step) out.push(Number(t.toPrecision(12)));
    return out;
  }

  // The ends of an axis: as given, else those of the values, with 0 among them if `zero`. They always differ.
  function range(values, low, high, zero) {
    const known = values.filter((v) => v !== null && v !== undefined);
    let a = low ?? Math.min(...known, zero ? 0 : Infinity), b = high ?? Math.max(...known, zero ? 0 : -Infinity);
    if (!Number.isFinite(a)) a = 0;
    if (!Number.isFinite(b)) b = 1;
    if (a === b) { a -= typeof low === "number" || (zero && a >= 0) ? 0 : 1; b += 1; }
    return [a, b];
  }

  function frame(width, height, label) {
    return svg("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": label });
  }

  function hatch(root) {
    const line = svg("path", { d: "M0 6 L6 0", class: "hatch" });
    root.append(svg("defs", {}, svg("pattern", { id: "hatch", width: 6, height: 6, patternUnits: "userSpaceOnUse" }, line)));
  }

  function text(x, y, words, attributes = {}) {
    return svg("text", { x, y, ...attributes }, String(words));
  }

  // On a phone pictures are lower, so that a page is shorter.
  const small = () => innerWidth < 780;

  function cut(words, most) {
    words = String(words);
    return words.length > most ? words.slice(0, Math.max(1, most - 1)) + "…" : words;
  }

  // Words on lines of at most `most` letters, three lines at most.
  function lines(words, most) {
    const out = [];
    for (const w of String(words).split(" ")) {
      if (out.length && (out[out.length - 1] + w).length < most) out[out.length - 1] += ` ${w}`;
      else out.push(w);
    }
    if (out.length > 3) out.splice(2, out.length, out.slice(2).join(" "));
    return out.map((line) => cut(line, most));
  }

  // A colour by a level in -1..1: an attribute that the style sheet turns into a colour (eight steps a side).
  function level(x) {
    const n = Math.max(-8, Math.min(8, Math.round((x ?? 0) * 8)));
    return n < 0 ? `low${-n}` : n > 0 ? `high${n}` : "level0";
  }

  function axisY(root, marks, y, left, right) {
    for (const t of marks) {
      root.append(svg("line", { x1: left, x2: right, y1: y(t), y2: y(t), class: t === 0 ? "axis" : "grid" }));
      root.append(text(left - 6, y(t) + 4, short(t), { "text-anchor": "end", class: "tick" }));
    }
  }

  function legend(names, className = (i) => TONES[i % TONES.length]) {
    if (names.length < 2) return "";
    const items = names.map((n, i) => html("li", {}, html("span", { class: `swatch ${className(i)}`, "aria-hidden": "true" }), n));
    return html("ul", { class: "legend" }, ...items);
  }

  function key(p) {
    const pairs = Object.entries(p.key || {});
    return pairs.length ? html("ul", { class: "legend" }, ...pairs.map(([tone, words]) =>
      html("li", {}, html("span", { class: `swatch ${tone}`, "aria-hidden": "true" }), words))) : "";
  }

  // --- the kinds ---

  function bars(p, width) {
    const names = Object.keys(p.series), left = 52, top = 14, room = (width - left - 8) / Math.max(1, p.labels.length);
    const labels = p.labels.map((label) => lines(label, Math.floor((room - 3) / 6.4)));
    const bottom = 26 + 14 * Math.max(1, ...labels.map((l) => l.length)), height = (small() ? 150 : 190) + bottom;
    const all = names.flatMap((n) => p.series[n]).concat(Object.values(p.marks || {}));
    const [low, high] = range(all, p.low, p.high, p.low === null);
    const marks = ticks(low, high), a = Math.min(low, marks[0]), b = Math.max(high, marks[marks.length - 1]);
    const y = (v) => top + (height - top - bottom) * (b - v) / (b - a), base = y(Math.max(a, Math.min(b, 0)));
    const root = frame(width, height, p.title), each = Math.min(46, room * 0.8 / names.length);
    hatch(root);
    axisY(root, marks, y, left, width - 8);
    p.labels.forEach((label, i) => {
      const middle = left + room * (i + 0.5);
      names.forEach((n, j) => {
        const v = p.series[n][i], x = middle + (j - names.length / 2) * each;
        const at = v === null ? base : y(v), place = { x, y: Math.min(at, base), width: Math.max(1, each - 2), height: Math.abs(base - at) };
        root.append(svg("rect", { ...place, class: `bar ${TONES[j % 4]}` }, svg("title", {}, `${label} ${n}: ${short(v)}`)));
        const words = v === null ? "" : String(Number(v.toPrecision(2)));
        if (words && words.length * 6.2 <= Math.max(each, room * 0.9 / names.length))
          root.append(text(x + each / 2 - 1, v < 0 ? at + 13 : at - 4, words, { "text-anchor": "middle", class: "value" }));
      });
      labels[i].forEach((line, j) => root.append(text(middle, height - bottom + 24 + 14 * j, line, { "text-anchor": "middle", class: "label" })));
    });
    for (const [name, v] of Object.entries(p.marks || {})) {
      root.append(svg("line", { x1: left, x2: width - 8, y1: y(v), y2: y(v), class: "mark" }));
      root.append(text(width - 10, y(v) - 4, `${name} ${short(v)}`, { "text-anchor": "end", class: "label" }));
    }
    return html("div", {}, root, legend(names));
  }

  const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  // uPlot draws on a canvas; its colours are read from the style sheet at that moment.
  function curve(p, width, old) {
    const names = Object.keys(p.series), data = [p.x, ...names.map((n) => p.series[n])];
    const shape = JSON.stringify([names, p.x_label, p.y_label, p.log, p.low, p.high, width, color("--ink"), p.x.length < 40]);
    if (old?.plot && old.shape === shape) {
      Object.assign(old.at, { value: p.at, low: p.low, high: p.high });
      old.plot.setData(data);
      old.kept = true;
      return old;
    }
    const host = html("div", { class: "curve", role: "img", "aria-label": p.title }), at = { value: p.at, low: p.low, high: p.high };
    const dash = [[], [8, 4], [2, 3], [10, 3, 2, 3]], drawn = ["solid", "dashed", "dotted", "dashed"];
    const whole = !p.log && p.x.every(Number.isInteger), incrs = whole ? [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 5000] : undefined;
    const series = names.map((n, i) => ({
      label: n, stroke: color(`--${TONES[i % 4]}`), width: 2, dash: dash[i % 4], spanGaps: false, points: { show: p.x.length < 40, size: 5 },
      value: (_, v) => short(v),
    }));
    const axis = { stroke: color("--ink"), grid: { stroke: color("--line"), width: 1 }, ticks: { stroke: color("--line") }, font: "12px system-ui" };
    const ends = { range: (u, low, high) => {
      const [a, b] = range([low, high], at.low, at.high, false);
      return [at.low ?? a - (b - a) * 0.05, at.high ?? b + (b - a) * 0.05];
    } };
    const plot = new uPlot({
      width, height: small() ? 195 : 240, legend: { show: true, live: true, markers: { width: 3, dash: (_, i) => drawn[(i - 1) % 4] } }, cursor: { drag: { x: false, y: false } },
      scales: { x: { time: false, distr: p.log ? 3 : 1 }, y: ends },
      series: [{ label: p.x_label, value: (_, v) => short(v) }, ...series],
      axes: [{ ...axis, ...(incrs && { incrs }), label: p.x_label, labelSize: 18, size: 40, labelFont: "12px system-ui", values: (_, vs) => vs.map(short) },
        { ...axis, label: p.y_label, labelSize: p.y_label ? 18 : 0, size: (_, vs) => Math.max(52, 14 + 7 * Math.max(0, ...(vs || []).map((v) => String(v).length))), labelFont: "12px system-ui", values: (_, vs) => vs.map(short) }],
      hooks: { draw: [(u) => {
        if (typeof at.value !== "number" || at.value < u.scales.x.min || at.value > u.scales.x.max) return;
        const x = u.valToPos(at.value, "x", true), c = u.ctx;
        c.save(); c.strokeStyle = color("--ink"); c.setLineDash([4, 4]); c.beginPath();
        c.moveTo(x, u.bbox.top); c.lineTo(x, u.bbox.top + u.bbox.height); c.stroke(); c.restore();
      }] },
    }, data, host);
    Object.assign(host, { plot, shape, at });
    return host;
  }

  function tiles(p) {
    const rows = Object.entries(p.rows_of).map(([name, ts]) => {
      const cells = ts.map(([words, tone, value, lvl, note]) => html("li", { class: `tile ${tone} ${lvl === null ? "" : level(lvl)}`, title: note || null },
        html("span", { class: "word" }, words), value === null ? "" : html("span", { class: "number" }, short(value))));
      return html("div", { class: "tilerow" }, name ? html("span", { class: "rowname" }, name) : "", html("ul", { class: "tiles" }, ...cells));
    });
    return html("div", {}, ...rows, key(p));
  }

  function tree(p, width) {
    const nodes = [], height = { used: 0 };
    // A leaf takes the next row, 30 pixels high. A node stands in the middle between its first and its last child.
    (function place([words, tone, value, below], depth) {
      const own = { words, tone, value, depth, y: 0, from: [] };
      nodes.push(own);
      own.from = below.map((b) => place(b, depth + 1));
      own.y = own.from.length ? (own.from[0].y + own.from[own.from.length - 1].y) / 2 : 18 + 30 * height.used++;
      return own;
    })(p.root, 0);
    const depth = Math.max(...nodes.map((n) => n.depth)), room = (width - 10) / (depth + 1), high = 30 * height.used + 12;
    const root = frame(width, high, p.title), wide = Math.min(200, room - 18);
    hatch(root);
    for (const n of nodes) for (const b of n.from) {
      const a = n.depth * room + 5 + wide, c = b.depth * room + 5;
      root.append(svg("path", { d: `M${a} ${n.y} C${a + 14} ${n.y} ${c - 14} ${b.y} ${c} ${b.y}`, class: "edge" }));
    }
    for (const n of nodes) {
      const x = n.depth * room + 5, words = n.value === null ? n.words : `${n.words} ${short(n.value)}`;
      root.append(svg("rect", { x, y: n.y - 12, width: wide, height: 24, rx: 4, class: `node ${n.tone}` }, svg("title", {}, words)));
      root.append(text(x + 7, n.y + 4, cut(words, Math.floor((wide - 10) / 6.8)), { class: "label" }));
    }
    return html("div", {}, root, key(p));
  }

  function gantt(p, width) {
    const lanes = Object.entries(p.lanes), left = Math.min(150, width * 0.28), row = 30, high = lanes.length * row + 34;
    const end = Math.max(1e-9, ...lanes.flatMap(([, spans]) => spans.map((s) => s[1]))), marks = ticks(0, end, 6).filter((t) => t <= end * 1.001);
    const x = (t) => left + (width - left - 14) * t / end, root = frame(width, high, p.title);
    hatch(root);
    for (const t of marks) {
      root.append(svg("line", { x1: x(t), x2: x(t), y1: 4, y2: high - 26, class: "grid" }));
      root.append(text(x(t), high - 8, t === 0 ? `0 ${p.unit}` : short(t), { "text-anchor": "middle", class: "tick" }));
    }
    lanes.forEach(([name, spans], i) => {
      root.append(text(left - 8, i * row + 22, cut(name, Math.floor(left / 6.8)), { "text-anchor": "end", class: "label" }));
      for (const [a, b, words, tone] of spans) {
        const wide = Math.max(1, x(b) - x(a) - 1);
        root.append(svg("rect", { x: x(a), y: i * row + 6, width: wide, height: row - 8, rx: 3, class: `span ${tone}` }, svg("title", {}, `${name}, ${words}: ${short(a)} to ${short(b)} ${p.unit}`)));
        if (wide > words.length * 7 + 6) root.append(text(x(a) + wide / 2, i * row + 22, words, { "text-anchor": "middle", class: `inside ${tone}` }));
      }
    });
    if (p.now !== null) root.append(svg("line", { x1: x(p.now), x2: x(p.now), y1: 0, y2: high - 24, class: "mark" }));
    return html("div", {}, root, key(p));
  }

  function matrix(p) {
    const known = p.values.flat().filter((v) => v !== null), low = p.low ?? Math.min(...known), high = p.high ?? Math.max(...known);
    const at = (v) => v === null || high === low ? 0 : low < 0 && high > 0 ? v / Math.max(-low, high) : (v - low) / (high - low);
    const head = html("tr", {}, html("td"), ...p.across.map((c) => html("th", { scope: "col" }, c)));
    const body = p.down.map((name, i) => html("tr", {}, html("th", { scope: "row" }, name), ...p.values[i].map((v, j) => {
      const chosen = p.chosen && p.chosen[0] === i && p.chosen[1] === j ? " chosen" : "";
      return html("td", { class: `cell ${level(at(v))}${chosen}` }, p.texts ? p.texts[i][j] : short(v));
    })));
    return html("div", { class: "wide", tabindex: "0", role: "group", "aria-label": p.title }, html("table", { class: "matrix" }, html("thead", {}, head), html("tbody", {}, ...body)));
  }

  const KINDS = { bars, curve, tiles, tree, gantt, matrix };

  function tableOf(p) {
    if (p.rows) return [p.columns, p.rows];
    const names = Object.keys(p.series), first = p.labels || p.x;
    return [[p.x_label || "", ...names], first.map((x, i) => [p.labels ? x : short(x), ...names.map((n) => short(p.series[n][i]))])];
  }

  function numbers(p) {
    const [columns, rows] = tableOf(p), head = html("tr", {}, ...columns.map((c) => html("th", { scope: "col" }, c)));
    const shown = rows.slice(0, 400).map((r) => html("tr", {}, ...r.map((c) => html("td", {}, c))));
    const more = rows.length > 400 ? html("p", {}, `and ${rows.length - 400} more rows`) : "";
    return html("div", { class: "wide", tabindex: "0", role: "group", "aria-label": `${p.title}, as a table` }, html("table", {}, html("thead", {}, head), html("tbody", {}, ...shown)), more);
  }

  // Gives an element the form of another of the same structure, so that bars move in place of being drawn anew.
  function become(old, now) {
    if (old.nodeName !== now.nodeName || old.childNodes.length !== now.childNodes.length) return false;
    const pairs = [...old.childNodes].map((c, i) => [c, now.childNodes[i]]);
    if (!pairs.every(([a, b]) => a.nodeType === b.nodeType && (a.nodeType === 3 || become(a, b)))) return false;
    for (const [a, b] of pairs) if (a.nodeType === 3 && a.data !== b.data) a.data = b.data;
    for (const { name, value } of now.attributes || []) if (old.getAttribute(name) !== value) old.setAttribute(name, value);
    for (const { name } of [...(old.attributes || [])]) if (!now.hasAttribute(name)) old.removeAttribute(name);
    return true;
  }

  // Whether a picture needs the whole width: its columns, or the words below its bars, need more than half of it.
  function broad(p) {
    const long = (words) => Math.max(0, ...words.map((w) => String(w).length));
    if (p.kind === "matrix") return p.across.reduce((sum, c, j) => sum + 26 + 7 * Math.min(30, long([c, ...(p.texts || []).map((row) => row[j])])), 90) > 420;
    return p.kind === "bars" && p.labels.length * (3 + 6.4 * long(p.labels.flatMap((l) => String(l).split(" ")))) > 330;
  }

  // Draws pictures into a place, in the figures that are there already where they have the same kind and title.
  function draw(place, pictures) {
    place.pictures = pictures;
    place.classList.toggle("single", pictures.length === 1);
    pictures.forEach((p, i) => {
      let figure = place.children[i];
      if (!figure || figure.dataset.kind !== p.kind) {
        const fresh = html("figure", { "data-kind": p.kind }, html("figcaption"), html("div", { class: "drawn" }), html("details", {}, html("summary", {}, "the numbers")));
        if (figure) figure.replaceWith(fresh); else place.append(fresh);
        figure = fresh;
        figure.querySelector("details").addEventListener("toggle", () => fill(figure));
      }
      figure.picture = p;
      figure.classList.toggle("broad", broad(p));
      figure.querySelector("figcaption").textContent = p.title;
    });
    while (place.children.length > pictures.length) place.lastChild.remove();
    // Widths are read once all figures are there: how many there are decides how wide each is.
    pictures.forEach((p, i) => {
      const figure = place.children[i];
      const width = Math.max(260, Math.min(860, figure.clientWidth || 600));
      const host = figure.querySelector(".drawn"), old = host.firstChild, now = KINDS[p.kind](p, width, old);
      if (now !== old && !(old && p.kind !== "curve" && become(old, now))) {
        old?.plot?.destroy();
        host.replaceChildren(now);
      }
      fill(figure);
    });
  }

  function fill(figure) {
    const details = figure.querySelector("details");
    if (!details.open) return;
    details.querySelector(".wide")?.remove();
    details.append(numbers(figure.picture));
  }

  // Draws again where the width or the theme changes.
  function watch(place) {
    let width = place.clientWidth, later = 0;
    const again = () => { clearTimeout(later); later = setTimeout(() => place.pictures && draw(place, place.pictures), 60); };
    new ResizeObserver(() => { if (Math.abs(place.clientWidth - width) > 4) { width = place.clientWidth; again(); } }).observe(place);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", again);
  }

  return { draw, watch, html, short };
})();
