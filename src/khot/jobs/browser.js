// The feature browser: reads the JSON in the page, and builds everything from text nodes, never from markup.
"use strict";
(() => {
  const $ = (id) => document.getElementById(id);
  const data = JSON.parse($("features").textContent);
  const [SHOWN, TOP, SAMPLED] = [300, 6, 7];
  const latents = data.latents, dead = data.dead.map((id) => [id, 0, 0, 0, 0, [], [], [], [], [], [], []]);
  const byId = new Map([...latents, ...dead].map((latent) => [latent[0], latent]));
  const figure = (value) => (value === 0 ? "0" : String(Number(value.toPrecision(3))));
  const percent = (share) => (share ? figure(100 * share) + " %" : "dead");
  let found = [], shown = SHOWN, current = null;

  function make(name, attributes = {}, ...children) {
    const svg = ["svg", "rect", "text", "line", "title"].includes(name);
    const element = svg ? document.createElementNS("http://www.w3.org/2000/svg", name) : document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) if (value !== null) element.setAttribute(key, value);
    element.append(...children);
    return element;
  }

  const word = (place) => data.words[data.text[place]];
  const focus = ([row, , start, offset]) => (start < 0 ? "row " + row : word(start + offset).trim() || "␣");

  function label(latent) {
    const counts = new Map();
    for (const example of latent[TOP]) counts.set(focus(example), (counts.get(focus(example)) || 0) + 1);
    return [...counts].sort((a, b) => b[1] - a[1]).slice(0, 4).map(([text]) => text).join(" · ");
  }

  const contextOf = ([, , start, , shades]) => {
    let text = "";
    for (let i = 0; start >= 0 && i < shades.length; i++) text += word(start + i);
    return text;
  };
  const searched = new Map();
  function textOf(latent) {
    if (!searched.has(latent[0])) {
      const all = [...latent[TOP], ...latent[SAMPLED]];
      const words = [...latent[10], ...latent[11]].map(([at]) => data.words[at]);
      searched.set(latent[0], {
        focus: latent[TOP].map(focus).join("\n").toLowerCase(),
        all: [...all.map(contextOf), ...all.map(focus), ...words].join("\n").toLowerCase(),
      });
    }
    return searched.get(latent[0]);
  }

  const ORDERS = {
    number: (a, b) => a[0] - b[0],
    maximum: (a, b) => b[3] - a[3] || a[0] - b[0],
    frequent: (a, b) => b[1] - a[1] || a[0] - b[0],
    rare: (a, b) => a[1] - b[1] || a[0] - b[0],
    mean: (a, b) => b[2] - a[2] || a[0] - b[0],
  };

  function search() {
    const query = $("query").value.trim().toLowerCase();
    const all = $("alive").checked ? latents : [...latents, ...dead];
    const rank = (latent) => {
      if (!query || String(latent[0]) === query) return 0;
      if (textOf(latent).focus.includes(query)) return 1;
      if (/^\d+$/.test(query) && String(latent[0]).startsWith(query)) return 2;
      return textOf(latent).all.includes(query) ? 3 : -1;
    };
    const order = ORDERS[$("order").value];
    found = all.map((latent) => [rank(latent), latent]).filter(([place]) => place >= 0);
    found = found.sort((a, b) => a[0] - b[0] || order(a[1], b[1])).map(([, latent]) => latent);
    shown = SHOWN;
    list();
  }

  function list() {
    const items = found.slice(0, shown).map((latent) => {
      const button = make(
        "button", { type: "button", "data-latent": latent[0], "aria-current": latent[0] === current ? "true" : null },
        make("span", { class: "number" }, String(latent[0])),
        make("span", { class: "name" }, latent[1] ? label(latent) : "never active"),
        make("span", { class: "share" }, percent(latent[1] / data.positions)),
      );
      return make("li", {}, button);
    });
    if (found.length > shown) {
      const more = make("button", { type: "button", id: "more" }, `Show more of ${found.length}`);
      items.push(make("li", { class: "more" }, more));
    }
    $("list").replaceChildren(...items);
    const of = latents.length + ($("alive").checked ? 0 : dead.length);
    $("status").textContent = found.length ? `${found.length} of ${of} latents` : `No latent of ${of} matches.`;
  }

  function histogram(latent) {
    const [first, counts] = [latent[4], latent[5]], top = Math.max(...counts), width = 320 / Math.max(8, counts.length);
    const picture = make("svg", { viewBox: "0 0 330 96", role: "img", "aria-label": "histogram of activations" });
    counts.forEach((count, i) => {
      const height = count ? Math.max(1.5, (74 * count) / top) : 0;
      const bar = { x: 4 + i * width, y: 78 - height, width: Math.max(1, width - 1.5), height };
      const between = `${figure(data.edges[first + i])} to ${figure(data.edges[first + i + 1])}: ${count}`;
      picture.append(make("rect", bar, make("title", {}, between)));
    });
    const end = 4 + counts.length * width;
    picture.append(make("line", { x1: 4, x2: 324, y1: 78.5, y2: 78.5 }));
    picture.append(make("text", { x: 4, y: 92 }, figure(data.edges[first])));
    const last = { x: Math.max(end, 120), y: 92, "text-anchor": "end" };
    picture.append(make("text", last, figure(data.edges[first + counts.length])));
    return picture;
  }

  function context([row, value, start, offset, shades]) {
    const text = make("span", { class: "text" });
    if (start < 0) text.append("row " + row);
    for (let i = 0; start >= 0 && i < shades.length; i++) {
      const shade = Number(shades[i]);
      const attributes = { class: i === offset ? "focus" : null };
      if (shade) Object.assign(attributes, { "data-shade": shade, style: `--shade: ${shade}` });
      const [, space, rest] = word(start + i).match(/^(\s*)([^]*)$/);
      text.append(i ? space : "", make("span", attributes, rest || "␣"));
    }
    return make("li", { class: "context", title: "row " + row }, make("span", { class: "value" }, figure(value)), text);
  }

  const contexts = (title, all) =>
    all.length ? [make("h4", {}, title), make("ul", {}, ...all.map(context))] : [];

  const effects = (title, all) => {
    const chips = all.map(([at, value]) => make("span", {}, data.words[at], make("small", {}, figure(value))));
    return all.length ? [make("h4", {}, title), make("div", { class: "chips" }, ...chips)] : [];
  };

  function reveal(button) {  // within the list alone: the page stays where it is
    const [outer, inner] = [$("list").getBoundingClientRect(), button.getBoundingClientRect()];
    if (inner.top < outer.top) $("list").scrollTop -= outer.top - inner.top;
    if (inner.bottom > outer.bottom) $("list").scrollTop += inner.bottom - outer.bottom;
  }

  function show(id, { scroll = false } = {}) {
    const latent = byId.get(id);
    current = latent ? id : null;
    for (const button of $("list").querySelectorAll("[aria-current]")) button.removeAttribute("aria-current");
    const place = found.findIndex((other) => other[0] === id);
    if (scroll && place >= shown) {
      shown = place + SHOWN;
      list();
    }
    const here = $("list").querySelector(`[data-latent="${id}"]`);
    here?.setAttribute("aria-current", "true");
    if (here && scroll) reveal(here);
    if (!latent) {
      $("detail").replaceChildren(make("p", {}, `Latent ${id} is not on this page, which has ${byId.size} of ${data.n}.`));
      return;
    }
    const title = make("h3", {}, "Latent ", make("a", { href: "#latent=" + id }, String(id)));
    const move = ["previous", "next"].map((name) => make("button", { type: "button", id: name }, name));
    const head = make("div", { class: "row" }, title, make("span", {}, ...move));
    if (!latent[1]) {
      $("detail").replaceChildren(head, make("p", {}, `It is active at none of ${data.positions} positions.`));
      return;
    }
    const facts = { active: `${percent(latent[1] / data.positions)} (${latent[1]})`, mean: figure(latent[2]), largest: figure(latent[3]) };
    const pairs = Object.entries(facts).map(([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, value)));
    const near = latent[8].map((other, i) => {
      const name = byId.has(other) && byId.get(other)[1] ? ` ${label(byId.get(other))}` : "";
      const cosine = make("small", {}, (latent[9][i] / 100).toFixed(2));
      return make("a", { class: "near", href: "#latent=" + other }, other + name, cosine);
    });
    const seen = new Set(latent[TOP].map(([row]) => row));
    const weaker = latent[SAMPLED].filter(([row]) => !seen.has(row));
    $("detail").replaceChildren(
      head, make("dl", {}, ...pairs),
      make("h4", {}, "Activations, on a logarithmic scale"), histogram(latent),
      ...contexts("Strongest, one from a document", latent[TOP]),
      ...contexts("A random sample of all", weaker),
      ...effects("Promotes", latent[10]), ...effects("Suppresses", latent[11]),
      ...(near.length ? [make("h4", {}, "Nearest directions"), make("div", { class: "chips" }, ...near)] : []),
    );
  }

  function choose(id, replace = true) {
    history[replace ? "replaceState" : "pushState"](null, "", "#latent=" + id);
    show(id, { scroll: true });
  }

  function step(by) {
    const at = found.findIndex((latent) => latent[0] === current);
    const next = found[at < 0 ? 0 : Math.min(found.length - 1, Math.max(0, at + by))];
    if (!next) return;
    choose(next[0]);
  }

  function fromAddress() {
    const match = /^#latent=(\d+)$/.exec(location.hash);
    if (match) show(Number(match[1]), { scroll: true });
    else if (current === null && found.length) show(found[0][0]);
  }

  $("query").addEventListener("input", search);
  $("order").addEventListener("change", search);
  $("alive").addEventListener("change", search);
  $("list").addEventListener("click", (event) => {
    const button = event.target.closest("button");
    if (button?.id === "more") { shown += SHOWN; list(); }
    else if (button) choose(Number(button.dataset.latent), false);
  });
  $("detail").addEventListener("click", (event) => {
    if (event.target.id === "next") { step(1); $("next")?.focus(); }
    if (event.target.id === "previous") { step(-1); $("previous")?.focus(); }
  });
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.target.matches("select")) return;
    const typing = event.target === $("query"), inside = typing || $("browser").contains(event.target);
    const by = { j: 1, k: -1, ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (event.key === "/" && !typing) { event.preventDefault(); $("query").focus(); $("query").select(); }
    else if (event.key === "Escape" && typing) $("query").blur();
    else if (by && (event.key.length > 1 ? inside : !typing)) { event.preventDefault(); step(by); }
  });
  addEventListener("hashchange", fromAddress);
  search();
  fromAddress();
})();
