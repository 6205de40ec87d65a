"use strict";
(() => {
  const drawer = document.getElementById("drawer"), body = drawer.querySelector(".body");
  let from = null;

  function forget() {
    for (const x of document.querySelectorAll(".chosen")) x.classList.remove("chosen");
  }

  // An event in full, beside whatever named it.
  function choose(id, link) {
    const event = document.getElementById("e" + id);
    if (!event) return;
    const copy = event.cloneNode(true);
    copy.removeAttribute("id");
    if (!drawer.contains(link)) from = link;
    body.replaceChildren(copy);
    drawer.hidden = false;
    drawer.scrollTop = 0;
    forget();
    for (const x of document.querySelectorAll(`[data-event="${id}"]`)) x.classList.add("chosen");
    for (const x of document.querySelectorAll(`.link[data-from="e${id}"], .link[data-to="e${id}"]`)) x.classList.add("chosen");
    drawer.focus({ preventScroll: true });
  }

  function close() {
    drawer.hidden = true;
    forget();
    if (from) from.focus({ preventScroll: true });
  }

  document.addEventListener("click", (e) => {
    const link = e.target.closest("a[data-event]");
    if (!link || e.ctrlKey || e.metaKey || e.shiftKey) return;
    e.preventDefault();
    choose(link.dataset.event, link);
  });
  drawer.querySelector(".close").addEventListener("click", close);
  document.addEventListener("keydown", (e) => { if (e.key === "Escape" && !drawer.hidden) close(); });

  // Where the graph is wider than the screen, it begins with its first call in the middle.
  const picture = document.querySelector(".picture"), first = picture.querySelector(".call");
  if (first) {
    const [inner, outer] = [first.getBoundingClientRect(), picture.getBoundingClientRect()];
    picture.scrollLeft = inner.left + inner.width / 2 - outer.left - outer.width / 2;
  }

  // Rows over time: places are shares of the width, so zooming is widening.
  const SVG = "http://www.w3.org/2000/svg", MOST = 256;

  function made(name, attributes, text) {
    const x = document.createElementNS(SVG, name);
    for (const key in attributes) x.setAttribute(key, attributes[key]);
    if (text) x.textContent = text;
    return x;
  }

  for (const chart of document.querySelectorAll(".gantt")) {
    const scroll = chart.querySelector(".scroll"), svg = chart.querySelector("svg.bars"), ticks = svg.querySelector(".ticks");
    const start = +svg.dataset.start, length = +svg.dataset.length, height = svg.getAttribute("height");
    let zoom = 1;

    // As much of a name as fits: all of it, of `actor.train` what comes after the dot, or the beginning. "": not even three letters.
    function shorten(name, share) {
      const after = /^\w+\.\w+$/.test(name) ? name.slice(name.indexOf(".") + 1) : name;
      if (share >= 1 || after.length <= name.length * share) return share >= 1 ? name : after;
      const letters = Math.floor(name.length * share) - 1;
      return letters >= 3 ? after.slice(0, letters) + "…" : "";
    }

    // A label stays at the left edge of the screen while its bar continues beyond it, and shortens where it is narrow.
    function label() {
      const view = scroll.getBoundingClientRect(), texts = [...svg.querySelectorAll(".slot text")];
      for (const text of texts) {
        text.dataset.name = text.dataset.name || text.textContent;
        if (text.textContent !== text.dataset.name) text.textContent = text.dataset.name;
      }
      const found = texts.map((text) => [text, text.getComputedTextLength(), text.parentNode.querySelector(".wait").getBoundingClientRect()]);
      for (const [text, wide, bar] of found) {
        const seen = bar.right > view.left && bar.left < view.right, cut = seen ? Math.max(0, view.left - bar.left) : 0;
        const room = (seen ? Math.min(bar.right, view.right) : bar.right) - bar.left - cut - 10;
        const short = shorten(text.dataset.name, wide ? room / wide : 0);
        text.setAttribute("x", cut + 6);
        if (short && short !== text.textContent) text.textContent = short;
        text.classList.toggle("tight", !short);
      }
    }

    function fit() {
      label();
      const width = scroll.clientWidth * zoom, rough = length * 110 / width, power = 10 ** Math.floor(Math.log10(rough));
      const step = [1, 2, 5, 10].map((n) => n * power).find((s) => s >= rough * 0.999);
      const [factor, unit] = length >= 1 ? [1, "s"] : [1000, "ms"];
      const digits = Math.max(0, -Math.floor(Math.log10(step * factor) + 1e-9)), found = [];
      for (let i = Math.ceil(start / step - 1e-9); i * step <= start + length; i++) {
        const x = (100 * (i * step - start) / length).toFixed(4) + "%";
        found.push(made("line", { x1: x, x2: x, y1: 20, y2: height }));
        found.push(made("text", { x, y: 12, dx: 3 }, (i * step * factor).toFixed(digits) + " " + unit));
      }
      ticks.replaceChildren(...found);
    }

    // at: the place on the screen that stays where it is.
    function set(to, at) {
      at = at === undefined ? scroll.clientWidth / 2 : at;
      to = Math.min(MOST, Math.max(1, to));
      const left = (scroll.scrollLeft + at) * to / zoom - at;
      zoom = to;
      svg.style.width = 100 * zoom + "%";
      scroll.scrollLeft = left;
      chart.dataset.zoom = zoom;
      fit();
    }

    for (const button of chart.querySelectorAll("button[data-zoom]")) {
      const by = +button.dataset.zoom;
      button.addEventListener("click", () => set(by ? zoom * by : 1));
    }
    scroll.addEventListener("wheel", (e) => {
      if (!e.ctrlKey && !e.metaKey) return;
      e.preventDefault();
      set(zoom * Math.exp(-e.deltaY / 300), e.clientX - scroll.getBoundingClientRect().left);
    }, { passive: false });
    scroll.addEventListener("scroll", label, { passive: true });
    const filter = chart.querySelector("input[type=search]"), matches = chart.querySelector(".matches");
    filter.addEventListener("input", () => {
      const words = filter.value.toLowerCase().split(/[\s,]+/).filter(Boolean);
      let count = 0;
      for (const slot of svg.querySelectorAll(".slot")) {
        const title = slot.querySelector("title").textContent.toLowerCase();
        const shown = !words.length || words.some((word) => title.includes(word));
        slot.classList.toggle("faded", !shown);
        count += shown;
      }
      matches.textContent = words.length ? `${count} shown` : "";
    });
    scroll.addEventListener("keydown", (e) => {
      if (e.ctrlKey || e.metaKey || e.altKey) return;
      const by = { "+": 2, "=": 2, "-": 0.5, "0": 0 }[e.key];
      if (by === undefined) return;
      e.preventDefault();
      set(by ? zoom * by : 1);
    });
    addEventListener("resize", fit);
    chart.querySelector(".tools").hidden = false;
    fit();
  }

  addEventListener("beforeprint", () => { for (const x of document.querySelectorAll("details")) x.open = true; });
})();
