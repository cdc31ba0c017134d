// Controls: search, colouring, sequences side by side, the outline and the token under the pointer.
const place = (name) => document.getElementById(name);
const panes = place("panes"), inspector = place("inspector"), outline = place("outline"), query = place("query"), menu = place("menu");
const strips = [];
let active = null, view = "origin", hits = [], hit = -1, hovered = "", settled = 0;

const probe = element("span", { hidden: true });
document.body.append(probe);
function variable(name, host) {
  host.append(probe);
  probe.style.color = `var(${name})`;
  const colour = getComputedStyle(probe).color;
  document.body.append(probe);
  return colour;
}
const ROLES = { user: "--user", prompt: "--user", assistant: "--assistant", system: "--system", developer: "--system", tool: "--tool", function: "--tool", image: "--quiet" };

function described(sequence, token) {
  const at = sequence.patch(token), { kind, sampled } = sequence.span(token);
  const parts = [sequence.text(token), `id ${sequence.ids[token]}`, `token ${token}`];
  if (at) parts[0] = `${data.media[at.medium.item].modality} ${at.medium.position}, ${at.medium.stop - at.medium.start} tokens`;
  const section = sequence.sections[sequence.section(token)];
  if (section) parts.push(section.label);
  parts.push(sampled ? "sampled" : kind);
  if (sequence.trained?.[token]) parts.push("trained");
  const mark = sequence.marked.get(token);
  if (mark) parts.push(mark.title);
  return parts.join(", ");
}

/** A window in which the panel covers tokens: it opens for a chosen token alone, or it would come and go under the pointer. */
const narrow = matchMedia("(max-width: 720px)");

const events = {
  described,
  variable,
  colour: (role, host) => variable(ROLES[role] || "--line", host),
  hover(strip, token) {
    if (narrow.matches || hovered === `${strip.sequence.index}-${token}`) return;
    hovered = `${strip.sequence.index}-${token}`;
    inspect(strip.sequence, token);
  },
  leave() {
    if (!hovered) return;
    hovered = "";
    if (active && active.current >= 0) inspect(active.sequence, active.current);
    else welcome();
  },
  select(strip, token) {
    choose(strip, token);
    strip.scroller.focus({ preventScroll: true });
  },
  scrolled(strip) {
    if (strip !== active) return;
    clearTimeout(settled);
    settled = setTimeout(followOutline, 80);
  },
};

function choose(strip, token, options) {
  activate(strip);
  const at = Math.max(0, Math.min(strip.sequence.length - 1, token));
  inspect(strip.sequence, at); // first: on a narrow screen its panel grows, and takes lines of the strip
  strip.go(at, options);
  clearTimeout(choose.linking); // browsers bound how often an address changes
  choose.linking = setTimeout(() => link(strip, at), 300);
}

/** Name the chosen token in the address, as in `tokens.html#t=0-151`: sequence and position. */
function link(strip, token) {
  if (location.protocol !== "about:") history.replaceState(null, "", `#t=${strip.sequence.index}-${token}`);
}

/** Go to the token that the address names; return whether it names one. */
function follow() {
  const [, index, token] = /^#t=(\d+)-(\d+)$/.exec(location.hash) || [];
  if (!sequences[index]) return false;
  choose(show(+index), +token, { middle: true });
  return true;
}

/** Save the data of this page, as JSON. */
function download() {
  const url = URL.createObjectURL(new Blob([JSON.stringify(data)], { type: "application/json" }));
  element("a", { href: url, download: "tokens.json" }).click();
  setTimeout(() => URL.revokeObjectURL(url), 1000);
}

function activate(strip) {
  if (active === strip) return;
  active = strip;
  drawOutline();
}

/** A row of the inspector. */
function fact(list, name, value) {
  if (value === undefined || value === null || value === "") return;
  list.append(element("dt", { textContent: name }), element("dd", { textContent: value }));
}

const WRITERS = {
  content: "the message", reasoning: "the message, reasoning", tool_call: "the message, a call", name: "the message, a name",
  extra: "the caller", tools: "the caller, tools", documents: "the caller, documents", image: "an image", video: "a video", prompt: "the prompt",
};
const nats = (value) => (typeof value === "number" ? value.toFixed(4).replace("-", "−") : value);

function inspect(sequence, token) {
  if (token < 0 || token >= sequence.length) return;
  const { kind, sampled, message } = sequence.span(token);
  const section = sequence.sections[sequence.section(token)];
  const at = sequence.patch(token);
  const values = Object.fromEntries(Object.entries(sequence.values).map(([name, all]) => [name, all[token]]));
  const parts = [];
  for (const mark of sequence.marks) {
    if (mark.token !== token && !(at && mark.medium === sequence.mediumAt[token])) continue;
    const note = element("div", { className: "note" }, element("b", { textContent: mark.title }), mark.text);
    const medium = mark.medium !== null && !at && sequence.media[mark.medium];
    if (medium) note.append(picture(medium, 96, { most: 240 }));
    parts.push(note);
  }
  parts.push(element("p", { className: "text", textContent: sequence.text(token) }));
  if (at) {
    const pictures = data.media[at.medium.item].pictures.length;
    const frames = at.medium.grid?.[0] || 1;
    const frame = frames > 1 && pictures > 1 ? Math.round(((at.frame || 0) * (pictures - 1)) / (frames - 1)) : 0;
    const shown = picture(at.medium, 190, { frame, patch: at.row === undefined ? null : at, most: innerWidth <= 720 ? 130 : 270 });
    shown.classList.add("shown");
    parts.push(shown);
    const { sound } = data.media[at.medium.item];
    if (sound) parts.push(element("audio", { controls: true, src: sound }));
  }
  const list = element("dl");
  fact(list, "id", `${sequence.ids[token]}`);
  fact(list, "position", number(token));
  fact(list, "role", section?.label);
  fact(list, "message", message >= 0 ? `${message}` : "");
  fact(list, "written by", sampled ? "the model, sampled" : WRITERS[kind] || "the template");
  fact(list, "trained on", sequence.trained ? (sequence.trained[token] ? "yes" : "no") : "");
  if (at) {
    const [frames, rows, columns] = at.medium.grid || [];
    if (frames > 1) fact(list, "frame", at.frame === undefined ? "" : `${at.frame + 1} of ${frames}`);
    const { duration } = data.media[at.medium.item];
    if (duration) {
      fact(list, "time", at.column === undefined ? "" : `${((at.column / columns) * duration).toFixed(2)} of ${duration.toFixed(2)} s`);
    } else {
      fact(list, "patch row", at.row === undefined ? "" : `${at.row + 1} of ${rows}`);
      fact(list, "patch column", at.column === undefined ? "" : `${at.column + 1} of ${columns}`);
    }
    if (at.feature < 0) fact(list, "feature", "none: a separator");
    fact(list, "identity", data.media[at.medium.item] && at.medium.item.slice(0, 12));
  }
  if (values.sampler !== undefined) {
    fact(list, "log-probability", nats(values.sampler));
    if (typeof values.sampler === "number") fact(list, "probability", Math.exp(values.sampler).toPrecision(3));
  }
  fact(list, "trainer", values.trainer === undefined ? "" : nats(values.trainer));
  fact(list, "difference", values.difference === undefined ? "" : nats(values.difference));
  for (const name of ["advantage", "reward", "weight"]) fact(list, name, values[name] === undefined ? "" : `${values[name]}`);
  parts.push(list);
  const close = element("button", { type: "button", className: "close", textContent: "×" });
  close.setAttribute("aria-label", "Close");
  close.addEventListener("click", welcome);
  inspector.classList.remove("idle");
  inspector.replaceChildren(close, ...parts);
}

function welcome() {
  inspector.classList.add("idle");
  inspector.replaceChildren(element("h2", { textContent: "Token" }),
    element("p", { className: "remarks", textContent: "Point at a token to see its id, its owner and its numbers; over a picture, the token that sees the patch there." }), ...remarks());
}

/** The notes about the sequence. */
function remarks() {
  return (active?.sequence.notes || []).map((note) => element("p", { className: "remarks", textContent: note }));
}

function drawOutline() {
  const { sequence } = active;
  const parts = [];
  // Where two sequences are compared, a mark has a twin, to which both jump.
  const marks = data.sideBySide ? data.marks.filter((mark) => mark.strip === 0) : data.marks;
  const found = marks.length ? `${marks.length} ${marks.length === 1 ? "mark" : "marks"}` : "";
  if (marks.length) {
    const list = element("ul", { className: "marks" });
    for (const mark of marks) {
      const label = element("span", { textContent: mark.title });
      if (sequences.length > 1 && !data.sideBySide) label.append(element("small", { textContent: sequences[mark.strip].name }));
      const button = element("button", { type: "button" }, label);
      button.addEventListener("click", () => jump(mark));
      list.append(element("li", {}, button));
    }
    parts.push(element("h2", { textContent: found }), list);
  }
  const list = element("ul");
  sequence.sections.slice(0, 2000).forEach((section, index) => {
    const count = sequence.sectionStop(index) - section.start;
    const button = element("button", { type: "button" }, element("span", { textContent: section.label }), element("small", { textContent: number(count) }));
    button.dataset.role = section.role;
    button.dataset.section = index;
    button.addEventListener("click", () => choose(active, section.start, { middle: true }));
    list.append(element("li", {}, button));
  });
  if (sequence.sections.length) parts.push(element("h2", { textContent: "Messages" }), list);
  const notes = element("div", { className: "notes" }, ...remarks()); // a narrow window has no panel for them
  parts.push(notes);
  menu.textContent = `☰ ${found || "Outline"}`;
  menu.setAttribute("aria-label", found ? `Outline and ${found}` : "Outline");
  outline.replaceChildren(...parts);
  events.scrolled(active);
}

/** Open or close the outline, which a narrow window shows over the tokens. */
function drawer(open) {
  outline.classList.toggle("open", open);
  menu.setAttribute("aria-expanded", open);
  if (open) outline.querySelector("button")?.focus();
}

/** Show in the outline which message is at the top; after scrolling, since it costs a layout. */
function followOutline() {
  const top = active.rows[active.rowAt(active.scroller.scrollTop + 40)];
  for (const button of outline.querySelectorAll("[data-section]")) {
    const now = top && +button.dataset.section === top.section;
    if (now === (button.getAttribute("aria-current") === "true")) continue;
    button.setAttribute("aria-current", now);
    if (now) outline.scrollTop = Math.max(0, button.offsetTop - outline.clientHeight / 2);
  }
}

function jump(mark) {
  const strip = show(mark.strip);
  for (const other of visible()) {
    if (other !== strip) other.go(Math.min(mark.token, other.sequence.length - 1), { middle: true });
  }
  choose(strip, mark.token, { middle: true });
}

/** The strip of a sequence, shown; with `alone` without the others. */
function show(index, { alone = false } = {}) {
  let strip = strips[index];
  if (!strip) {
    strip = strips[index] = new Strip(sequences[index], events);
    dress(strip);
    markHits(strip);
  }
  if (alone) panes.replaceChildren(strip.pane);
  else if (!strip.pane.isConnected) {
    const later = strips.slice(index + 1).find((other) => other?.pane.isConnected);
    panes.insertBefore(strip.pane, later?.pane || null);
  }
  arrange();
  return strip;
}

function visible() {
  return strips.filter((strip) => strip?.pane.isConnected);
}

function arrange() {
  const shown = visible();
  for (const strip of shown) strip.pane.classList.toggle("alone", shown.length === 1);
  for (const strip of shown) {
    const keep = strip.rows.length ? strip.rows[strip.rowAt(strip.scroller.scrollTop)].start : 0;
    const top = strip.scroller.scrollTop;
    strip.layout();
    if (top > 0 && strip.rows.length) strip.scroller.scrollTop = strip.rows[strip.rowOf(keep)].y;
    strip.draw();
  }
  for (const button of place("chooser").children) button.setAttribute("aria-pressed", shown.some((strip) => strip.sequence.index === +button.dataset.index));
  if (!shown.includes(active)) activate(shown[0]);
}

function markHits(strip) {
  strip.hits.fill(0);
  for (const [index, start, stop] of hits) if (index === strip.sequence.index) strip.hits.fill(1, start, stop);
}

function search() {
  const wanted = query.value;
  hits = wanted ? sequences.flatMap((sequence) => sequence.find(wanted).map(([start, stop]) => [sequence.index, start, stop])) : [];
  hit = -1;
  for (const strip of strips) {
    if (!strip) continue;
    markHits(strip);
    if (strip.pane.isConnected) {
      strip.refresh();
      strip.drawMap();
    }
  }
  place("hits").textContent = wanted ? (hits.length ? `${number(hits.length)} found` : "none") : "";
  if (hits.length) step(1);
}

function step(by) {
  if (!hits.length) return;
  hit = (hit + by + hits.length) % hits.length;
  const [index, start] = hits[hit];
  choose(show(index), start, { middle: true });
  place("hits").textContent = `${number(hit + 1)} of ${number(hits.length)}`;
}

function dress(strip) {
  strip.view = view;
  strip.scroller.classList.toggle("masked", view === "mask");
  strip.scroller.classList.toggle("scaled", view in SCALES);
}

function look(name) {
  view = name;
  for (const strip of strips) {
    if (!strip) continue;
    dress(strip);
    strip.refresh();
  }
  for (const button of place("views").children) {
    button.setAttribute("aria-checked", button.dataset.view === name);
    button.tabIndex = button.dataset.view === name ? 0 : -1;
  }
  drawLegend();
}

function drawLegend() {
  const chip = (classes, text, role) => {
    const sample = element("span", {}, element("span", { className: `t ${classes}`, textContent: "ab", "aria-hidden": "true" }), text);
    if (role) sample.dataset.role = role;
    return sample;
  };
  const parts = [];
  if (view === "mask") parts.push(chip("sampled trained", "trained on"), chip("template", "not trained on"));
  else if (SCALES[view]) {
    const { steps, signed, label } = SCALES[view];
    steps.forEach((text, bin) => text && parts.push(chip(`v${bin}`, text)));
    if (signed) parts.push(chip("v-3", `below zero, ${label.toLowerCase()}`));
  } else {
    const roles = new Set(sequences.flatMap((sequence) => sequence.sections.map((section) => section.role)));
    for (const role of ["system", "user", "tool", "assistant", "prompt"]) if (roles.has(role)) parts.push(chip("content", role, role));
    parts.push(chip("sampled", "sampled"));
    if (sequences.some((sequence) => sequence.trained)) parts.push(chip("sampled trained", "trained on"));
    parts.push(chip("template", "template"));
    if (sequences.some((sequence) => sequence.differs[1] > sequence.differs[0])) parts.push(chip("differs", "differs"));
  }
  place("legend").replaceChildren(...parts);
}

function section(by) {
  const { sequence } = active;
  const now = sequence.section(Math.max(active.current, 0));
  const next = Math.max(0, Math.min(sequence.sections.length - 1, now + by));
  if (sequence.sections.length) choose(active, sequence.sections[next].start, { middle: true });
}

function nextMedium(by) {
  const { media } = active.sequence;
  const order = by > 0 ? media : [...media].reverse();
  const next = order.find((medium) => (by > 0 ? medium.start > active.current : medium.stop <= active.current)) || order[0];
  if (next) choose(active, next.start, { middle: true });
}

function nextMark(by) {
  if (!data.marks.length) return;
  nextMark.at = ((nextMark.at ?? (by > 0 ? -1 : 0)) + by + data.marks.length) % data.marks.length;
  jump(data.marks[nextMark.at]);
}

function horizontal(by) {
  const { sequence, current, unfolded } = active;
  const now = sequence.mediumAt[Math.max(current, 0)];
  if (current >= 0 && now >= 0 && !unfolded.has(now)) return by > 0 ? sequence.media[now].stop : sequence.media[now].start - 1;
  const next = current + by;
  const medium = sequence.mediumAt[next];
  return medium >= 0 && !unfolded.has(medium) ? sequence.media[medium].start : next;
}

const KEYS = {
  ArrowRight: () => choose(active, horizontal(1)),
  ArrowLeft: () => choose(active, horizontal(-1)),
  ArrowDown: () => choose(active, active.vertical(1)),
  ArrowUp: () => choose(active, active.vertical(-1)),
  PageDown: () => choose(active, active.vertical(Math.floor(active.scroller.clientHeight / LINE) - 2)),
  PageUp: () => choose(active, active.vertical(2 - Math.floor(active.scroller.clientHeight / LINE))),
  Home: () => choose(active, 0),
  End: () => choose(active, active.sequence.length - 1),
  "]": () => section(1),
  "[": () => section(-1),
  i: () => nextMedium(1),
  I: () => nextMedium(-1),
  m: () => nextMark(1),
  M: () => nextMark(-1),
  n: () => step(1),
  N: () => step(-1),
  Enter: () => {
    const medium = active.sequence.mediumAt[Math.max(active.current, 0)];
    if (medium >= 0) active.fold(medium);
  },
};

document.addEventListener("keydown", (event) => {
  if (event.key === "/" && event.target !== query) {
    event.preventDefault();
    query.focus();
    return;
  }
  if (event.ctrlKey || event.metaKey || event.altKey || !active) return;
  const inStrip = event.target.classList?.contains("strip");
  if (!inStrip && event.target !== document.body && event.target !== panes) return;
  const act = KEYS[event.key];
  if (!act) return;
  event.preventDefault();
  if (inStrip) activate(strips.find((strip) => strip?.scroller === event.target));
  act();
});
query.addEventListener("input", search);
query.addEventListener("keydown", (event) => {
  if (event.key === "Enter") {
    event.preventDefault();
    step(event.shiftKey ? -1 : 1);
  }
  if (event.key === "Escape") {
    query.value = "";
    search();
    active.scroller.focus();
  }
});
place("next").addEventListener("click", () => step(1));
place("previous").addEventListener("click", () => step(-1));
place("theme").addEventListener("click", () => {
  const root = document.documentElement.style;
  const dark = root.colorScheme ? root.colorScheme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.colorScheme = dark ? "light" : "dark";
  for (const strip of visible()) strip.drawMap();
});
place("save").addEventListener("click", download);
addEventListener("hashchange", follow);
menu.addEventListener("click", () => drawer(!outline.classList.contains("open")));
panes.addEventListener("pointerdown", () => drawer(false));
outline.addEventListener("click", (event) => {
  if (!event.target.closest("button") || !outline.classList.contains("open")) return;
  drawer(false);
  active.scroller.focus({ preventScroll: true });
});
outline.addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || !outline.classList.contains("open")) return;
  drawer(false);
  menu.focus();
});
panes.addEventListener("focusin", (event) => {
  const strip = strips.find((one) => one?.scroller === event.target);
  if (strip) activate(strip);
});

for (const [name, whole] of [["beforeprint", true], ["afterprint", false]]) {
  addEventListener(name, () => {
    Strip.whole = whole;
    for (const strip of visible()) strip.draw();
  });
}

function start() {
  const style = getComputedStyle(document.body).getPropertyValue("--mono");
  ruler.font = `13px ${style}`;
  place("title").textContent = data.title;
  const sum = (count) => sequences.reduce((total, sequence) => total + count(sequence), 0);
  const tokens = sum((sequence) => sequence.length);
  const sampled = sum((sequence) => sequence.spans.reduce((total, [begin, end, , , is]) => total + (is ? end - begin : 0), 0));
  const trained = sum((sequence) => sequence.trained?.reduce((total, one) => total + one, 0) || 0);
  const media = (modality) => {
    const found = Object.values(data.media).filter((item) => item.modality === modality).length;
    return found && `${number(found)} ${modality}${found === 1 ? "" : "s"}`;
  };
  place("summary").textContent = [
    `${number(tokens)} tokens`, sampled && `${number(sampled)} sampled`, trained && `${number(trained)} trained on`,
    media("image"), media("video"),
  ].filter(Boolean).join(", ");
  if (sequences.length > 1) {
    for (const sequence of sequences) {
      const button = element("button", { type: "button" }, `${sequence.name} `, element("small", { textContent: number(sequence.length) }));
      button.dataset.index = sequence.index;
      button.addEventListener("click", () => {
        const strip = strips[sequence.index];
        if (strip?.pane.isConnected && visible().length > 1) {
          strip.pane.remove();
          arrange();
        } else show(sequence.index);
      });
      place("chooser").append(button);
    }
  }
  const views = ["origin", ...(sequences.some((sequence) => sequence.trained) ? ["mask"] : []), ...Object.keys(SCALES).filter((name) => sequences.some((sequence) => sequence.values[name]))];
  for (const name of views) {
    const label = name === "origin" ? "Origin" : name === "mask" ? "Loss mask" : SCALES[name].label;
    const button = element("button", { type: "button", role: "radio", textContent: label });
    button.dataset.view = name;
    button.addEventListener("click", () => look(name));
    place("views").append(button);
  }
  place("views").addEventListener("keydown", (event) => {
    const by = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (!by) return;
    event.preventDefault();
    const buttons = [...place("views").children];
    const next = buttons[(views.indexOf(view) + by + buttons.length) % buttons.length];
    look(next.dataset.view);
    next.focus();
  });
  if (!sequences.length) return welcome();
  const wide = innerWidth >= 1280 ? 2 : 1;
  const audit = Boolean(data.strips[0].values.trainer);
  const count = data.sideBySide ? 2 : sequences.length > 1 && !audit ? wide : 1;
  look(views.includes("difference") ? "difference" : "origin");
  for (let index = 0; index < Math.min(count, sequences.length); index++) show(index);
  activate(strips[0]);
  welcome();
  if (!follow() && (data.sideBySide || audit) && data.marks.length) jump(data.marks[0]);
  new ResizeObserver(() => requestAnimationFrame(() => {
    if (visible().some((strip) => strip.scroller.clientWidth !== strip.width)) return arrange();
    for (const strip of visible()) {
      strip.draw();
      strip.drawMap();
    }
  })).observe(panes);
}
start();
