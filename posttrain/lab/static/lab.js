// A lesson: reads the knobs, asks for a readout, shows it. It asks the server of `posttrain lab`, or, on the site, the
// readouts that were computed on a grid. The position of the knobs is the address's fragment.
"use strict";

(() => {
  const $ = (id) => document.getElementById(id);
  const { draw, watch, html, short } = Pictures;
  const lesson = JSON.parse($("lesson").textContent), onSite = lesson.where === "site";
  const knobs = new Map(lesson.knobs.map((k) => [k.name, k]));
  let state = {}, readout = null, asking = false, again = null, training = null, broken = null, grid = null;

  // --- the address ---

  function fromAddress() {
    const given = new URLSearchParams(location.hash.slice(1)), found = {};
    for (const k of lesson.knobs) found[k.name] = given.has(k.name) ? understood(k, given.get(k.name)) : k.default;
    return found;
  }

  function understood(k, words) {
    if (k.kind === "toggle") return words === "true" ? true : words === "false" ? false : k.default;
    if (k.kind === "options") return k.options.includes(words) ? words : k.default;
    if (k.kind === "textinput") return words.slice(0, k.longest);
    const x = Number(words);
    return words !== "" && x >= k.low && x <= k.high ? (k.whole ? Math.round(x) : x) : k.default;
  }

  function toAddress() {
    const changed = lesson.knobs.filter((k) => state[k.name] !== k.default);
    const words = new URLSearchParams(changed.map((k) => [k.name, String(state[k.name])])).toString();
    history.replaceState(null, "", words ? `#${words}` : location.pathname);
  }

  // --- the knobs ---

  const WAY = 1000;
  const toRange = (k, x) => k.log ? WAY * Math.log(x / k.low) / Math.log(k.high / k.low) : x;
  const fromRange = (k, r) => {
    if (!k.log) return k.whole ? Math.round(r) : Number(r);
    const x = k.low * (k.high / k.low) ** (r / WAY);
    return k.whole ? Math.round(x) : Number(x.toPrecision(3));
  };

  function show() {
    for (const k of lesson.knobs) {
      const field = $(`knob-${k.name}`), value = state[k.name];
      if (k.kind === "toggle") field.checked = value;
      else if (k.kind === "slider") {
        field.value = toRange(k, value);
        $(`value-${k.name}`).textContent = short(value);
        field.setAttribute("aria-valuetext", short(value));
      } else if (field.value !== value) field.value = value;
    }
  }

  function bind() {
    for (const k of lesson.knobs) {
      const field = $(`knob-${k.name}`);
      const changed = (final) => {
        state[k.name] = k.kind === "toggle" ? field.checked : k.kind === "slider" ? fromRange(k, Number(field.value)) : field.value;
        broken = null;
        show(); toAddress();
        if (lesson.pace === "live" || (lesson.pace === "release" && final)) ask();
        if (lesson.pace === "train" && final) { stop(); onSite ? ask() : status("press Train"); }
      };
      field.addEventListener("input", () => changed(false));
      field.addEventListener("change", () => changed(true));
    }
    $("reset").addEventListener("click", () => go({}));
    lesson.breaks.forEach((b, i) => $(`break-${i}`).addEventListener("click", () => go(b.values, b)));
    $("train")?.addEventListener("click", () => training ? stop() : ask());
    addEventListener("hashchange", () => { state = fromAddress(); broken = null; show(); ask(); });
  }

  function go(values, because = null) {
    stop();
    for (const k of lesson.knobs) state[k.name] = k.name in values ? values[k.name] : k.default;
    show(); toAddress();
    broken = because;
    ask();
  }

  // --- readouts ---

  function status(words) { $("status").textContent = words; }

  async function ask() {
    if (onSite) return askGrid();
    if (lesson.pace === "train") return train();
    if (asking) { again = true; return; }
    asking = true;
    const slow = setTimeout(() => status("computing ..."), 150);
    try {
      do {
        again = false;
        const answer = await fetch(`/readout/${lesson.name}`, { method: "POST", body: JSON.stringify(state) });
        if (answer.ok) present(await answer.json());
        else status(await answer.text());
      } while (again);
      clearTimeout(slow);
      if ($("status").textContent === "computing ...") status("");
    } catch { status("the lab does not answer: is `posttrain lab` still running?"); }
    clearTimeout(slow);
    asking = false;
  }

  async function train() {
    stop();
    const mine = training = new AbortController(), button = $("train");
    button.textContent = "Stop";
    status("starting ...");
    try {
      const answer = await fetch(`/train/${lesson.name}`, { method: "POST", body: JSON.stringify(state), signal: mine.signal });
      if (!answer.ok) { status(await answer.text()); return; }
      const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
      let rest = "", seen = 0;
      for (;;) {
        const { value, done } = await reader.read();
        if (done) break;
        const lines = (rest + value).split("\n");
        rest = lines.pop();
        for (const line of lines) {
          const got = JSON.parse(line);
          if (got.error) { status(got.error); return; }
          present(got);
          seen = got.progress;
          $("progress").value = got.progress;
          status(got.progress < 1 ? `training: ${Math.round(100 * got.progress)} %` : "trained");
        }
      }
      if (seen < 1 && training === mine) status("it ended early");
    } catch (error) {
      if (error.name !== "AbortError") status("the lab does not answer: is `posttrain lab` still running?");
      else if (training === null) status("stopped");
    } finally {
      if (training === mine || training === null) { training = null; button.textContent = "Train"; }
    }
  }

  function stop() { const was = training; training = null; was?.abort(); }

  // On the site: the computed position that is nearest in every knob of the grid; other knobs stay at their default.
  async function askGrid() {
    grid ??= await (await fetch(`data/${lesson.name}.json`)).json();
    const words = (v) => JSON.stringify(v), exact = grid.breaks[lesson.breaks.indexOf(broken)];
    if (exact) { status(""); return present(exact); }
    let free = lesson.knobs.some((k) => !grid.knobs.includes(k.name) && state[k.name] !== k.default);
    const at = grid.knobs.map((name, i) => {
      const k = knobs.get(name), values = grid.positions[i], v = state[name];
      if (k.kind !== "slider") return Math.max(0, values.findIndex((x) => words(x) === words(v)));
      const way = (x) => k.log ? Math.log(x) : x;
      const best = values.reduce((b, x, j) => Math.abs(way(x) - way(v)) < Math.abs(way(values[b]) - way(v)) ? j : b, 0);
      free ||= Math.abs(way(values[best]) - way(v)) > 1e-9;
      return best;
    });
    const index = at.reduce((sum, j, i) => sum * grid.positions[i].length + j, 0);
    present(grid.readouts[index]);
    const shown = grid.knobs.map((name, i) => `${name} = ${short(grid.positions[i][at[i]])}`).join(", ");
    status(free ? `shown: ${shown || "the default"}. Move freely: posttrain lab ${lesson.number}` : "");
  }

  function present(got) {
    readout = got;
    draw($("pictures"), got.pictures);
    $("sentence").replaceChildren(...emphasised(got.sentence));
    $("values").replaceChildren(...Object.entries(got.values).map(([name, v]) => html("li", {}, `${name} `, html("b", {}, v === null ? "not finite" : short(v)))));
    say(got);
    for (const check of checks) check();
    document.body.dataset.ready = String(Number(document.body.dataset.ready || 0) + 1);
  }

  // Words between ** are strong, between ` code; all is text, never HTML.
  function emphasised(words) {
    return words.split(/(\*\*[^*]+\*\*|`[^`]+`)/).filter(Boolean).map((part) =>
      part.startsWith("**") ? html("strong", {}, part.slice(2, -2)) : part.startsWith("`") ? html("code", {}, part.slice(1, -1)) : part);
  }

  function say(got) {
    const kinds = { rule: "a rule of the live diagnosis says", check: "a check stops the run and says", refusal: "the run is refused with" };
    const shown = got.says.map(([name, kind, words]) => html("div", { class: "says" }, html("span", { class: "by" }, `In a real run ${kinds[kind]} (${name}):`), html("p", {}, words)));
    if (broken && !broken.speaks && !shown.length) shown.push(html("div", { class: "quiet" }, "No run would notice this: nothing in the library speaks here."));
    if (broken) shown.unshift(html("p", {}, broken.what));
    $("says").replaceChildren(...shown);
  }

  // --- exercises ---

  const checks = [];
  function exercises() {
    lesson.exercises.forEach((e, i) => {
      const reply = $(`reply-${i}`), done = (right, words) => { reply.textContent = right ? `Right. ${e.why}` : words; reply.dataset.right = right; };
      if (e.kind === "asknumber") {
        const field = $(`exercise-${i}`);
        const look = () => {
          const x = Number(field.value.trim().replace(",", "."));
          if (field.value.trim() === "" || Number.isNaN(x)) return done(false, "Write a number.");
          done(Math.abs(x - e.answer) <= e.within * Math.max(Math.abs(e.answer), 1e-9), "Not yet.");
        };
        $(`check-${i}`).addEventListener("click", look);
        field.addEventListener("keydown", (event) => event.key === "Enter" && look());
      } else if (e.kind === "askchoice") {
        document.querySelectorAll(`input[name=exercise-${i}]`).forEach((field, j) => field.addEventListener("change", () => done(j === e.answer, "Not this one.")));
      } else {
        let moved = false;
        checks.push(() => {
          const x = readout.values[e.value];
          const met = x !== null && x !== undefined && (e.at_least === null || x >= e.at_least) && (e.at_most === null || x <= e.at_most);
          if (moved || !met) done(met, `Now: ${e.value} ${short(x)}.`);
          moved = true;
        });
      }
    });
  }

  // --- claims ---

  async function claims() {
    const place = $("claims");
    if (!place) return;
    const rows = onSite ? (grid ??= await (await fetch(`data/${lesson.name}.json`)).json()).claims
      : await (await fetch(`/claims/${lesson.name}`)).json();
    const names = ["claim", "source", "claimed", "ours", "verdict"], head = html("tr", {}, ...names.map((c) => html("th", { scope: "col" }, c)));
    let last = "";  // a reason that several rows share is said once
    const body = rows.map(([words, source, claimed, ours, holds, why]) => {
      const verdict = holds ? "holds" : why === last ? "does not hold" : `does not hold. ${why}`;
      if (!holds) last = why;
      return html("tr", {}, ...[words, source, short(claimed), short(ours), verdict].map((w, i) => html("td", { "data-name": names[i] }, w)));
    });
    const most = body.length > 5 ? 4 : body.length, more = body.slice(most);
    place.replaceChildren(html("table", { class: "claims" }, html("thead", {}, head), html("tbody", {}, ...body.slice(0, most))));
    if (more.length) place.append(html("details", {}, html("summary", {}, `${more.length} more`), html("table", { class: "claims" }, html("tbody", {}, ...more))));
  }

  function read() {
    try {
      const known = new Set(JSON.parse(localStorage.getItem("lab-read") || "[]"));
      localStorage.setItem("lab-read", JSON.stringify([...known.add(lesson.number)]));
    } catch { /* a browser that keeps nothing */ }
  }

  async function ready() {
    for (;;) {
      const answer = await fetch("/ready");
      if (answer.ok && await answer.json()) return;
      status("the library is being loaded ...");
      await new Promise((r) => setTimeout(r, 150));
    }
  }

  async function start() {
    state = fromAddress();
    bind(); show(); exercises(); watch($("pictures"));
    if (lesson.first && !location.hash) present(lesson.first);
    if (!onSite) { await ready(); status(""); }
    if (!onSite && lesson.pace === "train") { if (!readout) ask(); }
    else if (!lesson.first || location.hash) await ask();
    claims();
    read();
  }
  start();
})();
