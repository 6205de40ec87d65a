"use strict";
(() => {
  const source = document.getElementById("run-data");
  if (!source) return;
  const { runs } = JSON.parse(source.textContent), SVG = "http://www.w3.org/2000/svg";
  const LEFT = 58, RIGHT = 10, TOP = 8, BOTTOM = 20, HEIGHT = 160;
  const kept = ["smoothing", "log-scale", "x-axis", "metric-filter", "sample-step", "sample-sort", "sample-filter"];
  const by = (id) => document.getElementById(id);
  const figures = [...document.querySelectorAll("figure.metric")], reading = by("reading");
  let paused = false, at = null; // at: the place on the common axis that is read; null: the last numbers are shown

  function made(name, attributes, text) {
    const x = document.createElementNS(SVG, name);
    for (const key in attributes) x.setAttribute(key, attributes[key]);
    if (text !== undefined) x.textContent = text;
    return x;
  }

  // As `number_text` of rldsl/pages/run.py.
  function written(name, x) {
    if (x === null || x === undefined) return "not finite";
    if (name.split("/").pop().includes("bytes") && x >= 0) {
      let unit = 0;
      while (x >= 1024 && unit < 4) { x /= 1024; unit++; }
      return (unit ? x.toFixed(1) : Math.round(x)) + " " + ["B", "KiB", "MiB", "GiB", "TiB"][unit];
    }
    if (name === "seconds" || name.startsWith("time/")) return duration(x);
    if (Math.abs(x) >= 1e5) return Number.isInteger(x) ? x.toLocaleString("en") : x.toPrecision(4);
    const rounded = +x.toPrecision(4);  // what JavaScript writes as 0.00000105 has no room next to an axis
    return x && Math.abs(x) < 1e-4 ? rounded.toExponential() : String(rounded);
  }

  function duration(x) {
    const short = (n, unit) => String(+n.toPrecision(3)) + " " + unit;
    return x >= 1 || x <= 0 ? short(x, "s") : x >= 1e-3 ? short(x * 1e3, "ms") : short(x * 1e6, "µs");
  }

  // A moving average that forgets by the factor w, without the bias of its begin.
  function smooth(values, w) {
    let sum = 0, weight = 0;
    return values.map((y) => {
      if (y === null) return null;
      sum = sum * w + y * (1 - w);
      weight = weight * w + 1 - w;
      return sum / weight;
    });
  }

  function ticks(low, high, most) {
    const rough = (high - low) / most || 1, power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((n) => n * power).find((s) => s >= rough * 0.999), found = [];
    for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) found.push(+(i * step).toPrecision(12));
    return found;
  }

  const xs = (run) => run[by("x-axis").value];

  function axis() {
    const every = runs.flatMap((run) => [xs(run)[0], xs(run)[xs(run).length - 1]]).filter((x) => x !== undefined);
    return [Math.min(...every), Math.max(...every)];
  }

  function draw(figure) {
    const name = figure.dataset.metric, plot = figure.querySelector(".plot"), width = Math.max(160, plot.clientWidth);
    const found = runs.map((run) => ({ run, values: run.metrics[name] })).filter((one) => one.values);
    const finite = found.flatMap((one) => one.values).filter((y) => y !== null);
    const log = by("log-scale").checked && finite.every((y) => y > 0), f = log ? Math.log10 : (y) => y;
    const [first, last] = axis(), w = +by("smoothing").value;
    let low = Infinity, high = -Infinity;
    for (const y of finite) { low = Math.min(low, f(y)); high = Math.max(high, f(y)); }
    if (!finite.length) { plot.replaceChildren(); return; }
    const apart = high - low || Math.abs(high) || 1;
    [low, high] = [low - apart * 0.06, high + apart * 0.06];
    const x = (v) => LEFT + (width - LEFT - RIGHT) * (last > first ? (v - first) / (last - first) : 0.5);
    const y = (v) => HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (f(v) - low) / (high - low);
    const svg = made("svg", { width, height: HEIGHT, class: "curve-plot", "aria-hidden": "true" });
    for (const t of ticks(low, high, 4)) {
      const v = log ? 10 ** t : t, place = y(v);
      svg.append(made("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: place, y2: place }));
      svg.append(made("text", { x: LEFT - 6, y: place + 3.5, "text-anchor": "end" }, written(name, v)));
    }
    const time = by("x-axis").value === "seconds";
    for (const t of ticks(first, last, Math.min(6, width / 90))) {
      svg.append(made("text", { x: x(t), y: HEIGHT - 4, "text-anchor": "middle" }, time ? duration(t) : String(t)));
    }
    const path = (one, values) => {
      let text = "", pen = false;
      values.forEach((v, i) => {
        if (v !== null) text += (pen ? "L" : "M") + x(xs(one.run)[i]).toFixed(1) + " " + y(v).toFixed(1);
        pen = v !== null;
      });
      return text;
    };
    const several = found.some((one) => one.values.filter((v) => v !== null).length > 1);
    found.forEach((one) => {
      const style = "run" + runs.indexOf(one.run);
      if (w > 0) svg.append(made("path", { class: style + " raw", d: path(one, one.values) }));
      svg.append(made("path", { class: style, d: path(one, w > 0 ? smooth(one.values, w) : one.values) }));
      if (!several) one.values.forEach((v, i) => v === null || svg.append(made("circle", { class: style, cx: x(xs(one.run)[i]), cy: y(v), r: 3 })));
    });
    svg.append(made("line", { class: "cross", y1: TOP, y2: HEIGHT - BOTTOM, x1: 0, x2: 0, visibility: "hidden" }));
    plot.replaceChildren(svg);
    figure.place = x;
    figure.value = (pixel) => first + (last - first) * Math.min(1, Math.max(0, (pixel - LEFT) / (width - LEFT - RIGHT)));
  }

  function nearest(list, v) {
    let best = 0;
    list.forEach((x, i) => { if (Math.abs(x - v) < Math.abs(list[best] - v)) best = i; });
    return best;
  }

  function read() {
    for (const figure of figures) {
      const name = figure.dataset.metric, now = figure.querySelector(".now"), line = figure.querySelector(".cross");
      now.dataset.last = now.dataset.last || now.textContent;
      if (at === null || !line) {
        now.textContent = now.dataset.last;
        if (line) line.setAttribute("visibility", "hidden");
        continue;
      }
      const parts = runs.filter((run) => run.metrics[name]).map((run) => {
        const i = nearest(xs(run), at);
        return (runs.length > 1 ? run.name + " " : "") + `step ${run.steps[i]}: ` + written(name, run.metrics[name][i]);
      });
      now.textContent = parts.join(" · ");
      const place = figure.place(xs(runs[0]).length ? xs(runs[0])[nearest(xs(runs[0]), at)] : at);
      line.setAttribute("x1", place);
      line.setAttribute("x2", place);
      line.setAttribute("visibility", "visible");
    }
  }

  function all() {
    for (const figure of figures) if (!figure.hidden) draw(figure);
    read();
  }

  function filter() {
    const words = by("metric-filter").value.toLowerCase().split(/[\s,]+/).filter(Boolean);
    for (const figure of figures) {
      figure.hidden = words.length > 0 && !words.some((word) => figure.dataset.metric.toLowerCase().includes(word));
    }
    reading.textContent = words.length ? `${figures.filter((f) => !f.hidden).length} shown` : "";
  }

  function settle() {
    by("smoothing-value").textContent = by("smoothing").value;
    filter();
    all();
  }

  if (figures.length) {
    for (const figure of figures) {
      figure.addEventListener("pointermove", (e) => {
        if (!figure.value) return;
        at = figure.value(e.clientX - figure.querySelector(".plot").getBoundingClientRect().left);
        read();
      });
      figure.addEventListener("pointerleave", () => { at = null; read(); });
      figure.addEventListener("keydown", (e) => {
        const list = xs(runs[0]), i = at === null ? list.length - 1 : nearest(list, at);
        const to = { ArrowLeft: i - 1, ArrowRight: i + 1, Home: 0, End: list.length - 1 }[e.key];
        if (e.key === "Escape") at = null;
        else if (to === undefined || !list.length || e.ctrlKey || e.metaKey || e.altKey) return;
        else at = list[Math.min(list.length - 1, Math.max(0, to))];
        e.preventDefault();
        read();
        reading.textContent = at === null ? "" : `${figure.dataset.metric}, ${figure.querySelector(".now").textContent}`;
      });
    }
    for (const id of ["smoothing", "log-scale", "x-axis", "metric-filter"]) by(id).addEventListener("input", () => { at = null; settle(); });
    addEventListener("resize", all);
    document.querySelector(".metric-tools").hidden = false;
  }

  const list = by("sample-list"), samples = list ? [...list.children] : [];

  function choose() {
    const step = by("sample-step").value, text = by("sample-filter").value.toLowerCase(), sort = by("sample-sort").value;
    let count = 0;
    for (const one of samples) {
      one.hidden = step !== "" && one.dataset.step !== step || text !== "" && !one.textContent.toLowerCase().includes(text);
      count += !one.hidden;
    }
    const name = sort.replace(/^-/, ""), sign = sort.startsWith("-") ? 1 : -1;
    const value = (one) => { const x = JSON.parse(one.dataset.values)[name]; return x === undefined ? -Infinity * sign : x; };
    list.append(...(sort ? [...samples].sort((a, b) => sign * (value(a) - value(b)) || 0) : samples));
    by("sample-count").textContent = step || text ? `${count} shown` : "";
  }

  if (samples.length) {
    for (const id of ["sample-step", "sample-sort", "sample-filter"]) by(id).addEventListener("input", choose);
    document.querySelector(".sample-tools").hidden = false;
  }

  const STORED = "rldsl " + location.pathname;

  // While the run runs the page loads itself again. What was set stays, and nothing is taken from under a reader.
  const stored = () => { try { return JSON.parse(sessionStorage.getItem(STORED) || "{}"); } catch { return {}; } };
  const before = stored();
  for (const id of kept) {
    const field = by(id), value = before[id];
    if (!field || value === undefined) continue;
    if (field.type === "checkbox") field.checked = value;
    else if (field.tagName !== "SELECT" || [...field.options].some((o) => o.value === value)) field.value = value;
  }
  addEventListener("pagehide", () => {
    const now = {};
    for (const id of kept) if (by(id)) now[id] = by(id).type === "checkbox" ? by(id).checked : by(id).value;
    now.paused = paused;
    try { sessionStorage.setItem(STORED, JSON.stringify(now)); } catch { /* the browser keeps nothing */ }
  });
  if (figures.length) settle();
  if (samples.length) choose();

  const live = by("live"), refresh = +document.body.dataset.refresh || 0;
  if (live && refresh) {
    const pause = live.querySelector("button");
    let waited = 0;
    paused = !!before.paused;
    const show = () => { pause.textContent = paused ? "Continue" : "Pause"; live.classList.toggle("paused", paused); };
    pause.addEventListener("click", () => { paused = !paused; show(); });
    show();
    pause.hidden = false;
    setInterval(() => {
      const busy = at !== null || document.querySelector("details[open].sample, #drawer:not([hidden])") ||
        ["INPUT", "SELECT"].includes((document.activeElement || {}).tagName);
      waited = paused || busy ? 0 : waited + 1;
      if (waited >= refresh) location.reload();
    }, 1000);
  }
})();
