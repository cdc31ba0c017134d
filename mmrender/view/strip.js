// One sequence as a strip: lines are broken here, so that only those in sight need to be in the document.
const LINE = 25, HEAD = 42, CARD = 136, PICTURE = 112, AHEAD = 125;
const RIGHT_TO_LEFT = /[\u0590-\u08ff\ufb1d-\ufdff\ufe70-\ufeff\ud802-\ud803\ud83a-\ud83b]/;
const measured = new Map();
const ruler = document.createElement("canvas").getContext("2d");

function widthOf(text) {
  let width = measured.get(text);
  if (width === undefined) measured.set(text, (width = ruler.measureText(text).width + 3));
  return width;
}

/** A picture of a medium with its grid; `patch` frames one cell. Every size is set by script, none by markup. */
function picture(medium, height, { frame = 0, patch = null, most = 400 } = {}) {
  const item = data.media[medium.item];
  const source = item.pictures[Math.min(frame, item.pictures.length - 1)];
  let width = Math.max(28, (height * item.width) / Math.max(item.height, 1));
  if (width > most) [width, height] = [most, Math.max(20, (height * most) / width)];
  const host = element("div", { className: "picture" });
  host.style.width = `${width}px`;
  host.style.height = `${height}px`;
  if (source === undefined) {
    host.classList.add("none");
    host.append("no pixels");
    return host;
  }
  host.append(element("img", { src: source, alt: "", draggable: false }));
  if (medium.grid) {
    const [, rows, columns] = medium.grid;
    const lines = element("div", { className: "grid" });
    lines.style.backgroundSize = `${100 / columns}% 100%, 100% ${100 / rows}%`;
    lines.style.backgroundSize = `${width / columns}px ${height / rows}px`;
    host.append(lines);
    if (patch) {
      const mark = element("div", { className: "patch" });
      Object.assign(mark.style, {
        left: `${(patch.column / columns) * 100}%`, top: `${(patch.row / rows) * 100}%`,
        width: `${100 / columns}%`, height: `${100 / rows}%`,
      });
      host.append(mark);
    }
  }
  return host;
}

const MOST_PRINTED = 1500;
const BLANK = element("span", { role: "gridcell" });

class Strip {
  constructor(sequence, events) {
    Object.assign(this, { sequence, events, rows: [], shown: new Map(), unfolded: new Set(), hits: new Uint8Array(sequence.length), current: -1, view: "origin" });
    this.space = element("div", { className: "space", role: "presentation" });
    this.scroller = element("div", {
      className: "strip", role: "grid", tabIndex: 0, "aria-label": `Tokens of ${sequence.name}`, "aria-readonly": "true",
    }, this.space);
    this.map = element("canvas", { className: "map", "aria-hidden": "true" });
    const heading = element("h2", {}, element("b", { textContent: sequence.name }), ` ${number(sequence.length)} tokens`);
    this.pane = element("section", { className: "pane", "aria-label": sequence.name }, heading, this.scroller, this.map);
    this.scroller.addEventListener("scroll", () => this.draw(), { passive: true });
    this.scroller.addEventListener("pointermove", (event) => this.hover(event));
    this.scroller.addEventListener("pointerleave", () => events.leave());
    this.scroller.addEventListener("click", (event) => this.click(event));
    this.map.addEventListener("pointerdown", (event) => {
      const part = event.offsetY / this.map.clientHeight;
      this.scroller.scrollTop = part * this.height - this.scroller.clientHeight / 2;
    });
  }

  /** Break the sequence into rows of known heights. */
  layout() {
    const width = this.scroller.clientWidth - (innerWidth <= 720 ? 44 : 56);
    if (width <= 0) return;
    this.room = width;
    const { sequence, rows } = this;
    const { sections, media, mediumAt } = sequence;
    rows.length = 0;
    let y = 6, begin = 0, used = 0, section = -1;
    const add = (kind, start, stop, height, rest) => {
      rows.push({ kind, start, stop, y, height, section, ...rest });
      y += height;
    };
    const flush = (stop) => {
      if (stop > begin) add("line", begin, stop, LINE);
      begin = stop;
      used = 0;
    };
    for (let token = 0; token < sequence.length; token++) {
      if (section + 1 < sections.length && sections[section + 1].start <= token) {
        flush(token);
        section += 1;
        add("head", token, token, HEAD);
      }
      const place = mediumAt[token];
      if (place >= 0 && media[place].start === token) {
        flush(token);
        // A sound track, which has the range of its video, has a card of its own.
        for (let at = place; media[at]?.start === token; at += 1) add("card", token, media[at].stop, CARD, { place: at });
        if (!this.unfolded.has(place)) {
          token = media[place].stop - 1;
          begin = token + 1;
          continue;
        }
      }
      const text = sequence.text(token);
      const wide = Math.min(width, widthOf(text));
      if (used + wide > width) flush(token);
      used += wide;
      if (text.endsWith(BREAK) || (place >= 0 && media[place].stop === token + 1)) flush(token + 1);
    }
    flush(sequence.length);
    // Panes beside each other can be scrolled to the same height, however short one of them is.
    this.height = y + (this.pane.classList.contains("alone") ? 40 : this.scroller.clientHeight * 0.6);
    this.width = this.scroller.clientWidth;
    this.space.style.height = `${this.height}px`;
    this.scroller.setAttribute("aria-rowcount", rows.length);
    this.clear();
    this.draw();
    this.drawMap();
  }

  clear() {
    for (const shown of this.shown.values()) shown.remove();
    this.shown.clear();
    this.first = this.last = -1;
  }

  /** Index of the row at a height. */
  rowAt(y) {
    let low = 0, high = this.rows.length - 1;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (this.rows[middle].y <= y) low = middle;
      else high = middle - 1;
    }
    return low;
  }

  rowOf(token) {
    let low = 0, high = this.rows.length - 1;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (this.rows[middle].start <= token) low = middle;
      else high = middle - 1;
    }
    return low;
  }

  draw() {
    const everything = Strip.whole && this.rows.length <= MOST_PRINTED;
    if (!this.rows.length) return;
    const top = this.scroller.scrollTop;
    const first = everything ? 0 : this.rowAt(top - AHEAD);
    const last = everything ? this.rows.length - 1 : this.rowAt(top + this.scroller.clientHeight + AHEAD);
    if (!everything && first === this.first && last === this.last) return;
    [this.first, this.last] = everything ? [-1, -1] : [first, last];
    for (const [index, shown] of this.shown) {
      if (index >= first && index <= last) continue;
      shown.remove();
      this.shown.delete(index);
    }
    const added = document.createDocumentFragment();
    for (let index = first; index <= last; index++) {
      if (this.shown.has(index)) continue;
      const made = this.row(this.rows[index], index);
      this.shown.set(index, made);
      added.append(made);
    }
    if (added.childNodes.length) this.space.append(added);
    if (everything) this.space.append(...[...this.shown].sort(([one], [other]) => one - other).map(([, made]) => made));
    this.events.scrolled(this);
  }

  row(row, index) {
    const { sequence } = this;
    const section = sequence.sections[row.section];
    const host = element("div", { className: `row ${row.kind}-row`, role: "row", "aria-rowindex": index + 1 });
    if (section) host.dataset.role = section.role;
    host.style.transform = `translateY(${row.y}px)`;
    host.style.height = `${row.height}px`;
    if (row.kind === "head") {
      const count = sequence.sectionStop(row.section) - section.start;
      const cell = element("div", { role: "gridcell" }, element("span", { className: "label", textContent: section.label }),
        element("span", { className: "count", textContent: `${number(count)} token${count === 1 ? "" : "s"}` }));
      host.append(cell);
    } else if (row.kind === "card") {
      host.append(this.card(row.place));
    } else {
      for (let token = row.start; token < row.stop; token++) host.append(this.token(token));
    }
    return host;
  }

  token(token) {
    const cell = BLANK.cloneNode();
    cell.id = `t${this.sequence.index}-${token}`;
    cell.textContent = this.sequence.text(token);
    cell.className = this.classes(token);
    cell.dataset.token = token;
    return cell;
  }

  classes(token) {
    const { sequence, view } = this;
    const { kind, sampled } = sequence.span(token);
    const names = ["t", sequence.mediumAt[token] >= 0 ? "media" : CONTENT.has(kind) ? "content" : "template"];
    if (kind === "reasoning") names.push("reasoning");
    if (sampled) names.push("sampled");
    if (sequence.trained?.[token]) names.push("trained");
    if (SCALES[view]) {
      const bin = scaled(view, sequence.values[view]?.[token]);
      if (bin !== null) names.push(`v${bin}`);
    }
    if (token >= sequence.differs[0] && token < sequence.differs[1]) names.push("differs");
    if (sequence.marked.has(token)) names.push("marked");
    if (this.hits[token]) names.push("found");
    if (token === this.current) names.push("current");
    const text = sequence.text(token);
    if (widthOf(text) > this.room) names.push("wide");
    if (RIGHT_TO_LEFT.test(text)) names.push("strong");
    return names.join(" ");
  }

  card(place) {
    const { sequence } = this;
    const medium = sequence.media[place], item = data.media[medium.item];
    const count = Math.max(1, item.pictures.length);
    const frames = element("div", { className: "frames", tabIndex: count > 1 ? 0 : -1 });
    for (let frame = 0; frame < count; frame++) {
      const shown = picture(medium, PICTURE, { frame, most: Math.min(count > 1 ? 180 : 300, this.room * 0.46) });
      shown.dataset.frame = frame;
      if (item.frames) shown.append(element("span", { className: "time", textContent: `${+item.seconds[frame].toFixed(2)} s` }));
      frames.append(shown);
    }
    const open = this.unfolded.has(sequence.mediumAt[medium.start]);
    const isAudio = item.modality === "audio";
    const grid = !isAudio && medium.grid && `${medium.grid[0] > 1 ? `${medium.grid[0]} × ` : ""}${medium.grid[1]} × ${medium.grid[2]} patches`;
    const tiles = !isAudio && !medium.grid && item.layout.length ? `${item.layout.join(" × ")} tiles` : "";
    const tokens = medium.stop - medium.start;
    const about = element("div", { className: "about" },
      element("b", { textContent: `${item.modality} ${medium.position}` }),
      element("div", { textContent: `${number(tokens)} tokens, ${medium.start}\u2060–\u2060${medium.stop - 1}` }),
      element("div", { textContent: [item.frames > count && `${count} of ${item.frames} frames`, grid || tiles, isAudio ? `${item.width} samples` : `${item.width} × ${item.height} px`].filter(Boolean).join(", ") }),
      element("button", { type: "button", tabIndex: -1, textContent: open ? "Fold tokens" : "Show tokens", "aria-expanded": open }));
    about.lastChild.dataset.fold = place;
    const marked = [...sequence.marked.keys()].some((token) => token >= medium.start && token < medium.stop)
      || sequence.marks.some((mark) => mark.medium === place);
    const current = this.current >= medium.start && this.current < medium.stop;
    const card = element("div", { className: `card${marked ? " marked" : ""}${current ? " current" : ""}`, role: "gridcell" }, frames, about);
    card.id = `m${sequence.index}-${place}`;
    card.dataset.place = place;
    card.dataset.token = medium.start;
    return card;
  }

  /** The token under the pointer; over a picture the token that sees the patch there. */
  under(event) {
    const shown = event.target.closest?.(".picture");
    const card = event.target.closest?.(".card");
    if (shown && card) {
      const place = +card.dataset.place, medium = this.sequence.media[place];
      if (!medium.grid) return medium.start;
      const box = shown.getBoundingClientRect();
      const [frames, rows, columns] = medium.grid;
      const inside = (value, most) => Math.max(0, Math.min(most - 1, Math.floor(value * most)));
      const pictures = data.media[medium.item].pictures.length;
      const frame = pictures > 1 ? Math.round((+shown.dataset.frame * (frames - 1)) / (pictures - 1)) : 0;
      return this.sequence.tokenAt(place, frame, inside((event.clientY - box.top) / box.height, rows), inside((event.clientX - box.left) / box.width, columns));
    }
    const cell = event.target.closest?.("[data-token]");
    return cell ? +cell.dataset.token : -1;
  }

  hover(event) {
    const token = this.under(event);
    if (token >= 0) this.events.hover(this, token);
    else this.events.leave();
  }

  click(event) {
    if (event.target.dataset?.fold !== undefined) return this.fold(+event.target.dataset.fold);
    const token = this.under(event);
    if (token >= 0) this.events.select(this, token);
  }

  fold(at) {
    const { media, mediumAt } = this.sequence;
    const place = mediumAt[media[at].start]; // a sound track is shown with its video
    const before = this.rows[this.rowOf(media[place].start)].y - this.scroller.scrollTop;
    if (!this.unfolded.delete(place)) this.unfolded.add(place);
    this.layout();
    this.scroller.scrollTop = this.rows.find((row) => row.kind === "card" && row.place === place).y - before;
    this.draw();
  }

  /** Make a token the current one, and bring it into sight. */
  go(token, { middle = false } = {}) {
    const previous = this.current;
    this.current = token;
    const row = this.rows[this.rowOf(token)];
    if (row) {
      const { scrollTop: top, clientHeight: height } = this.scroller;
      if (middle || row.y < top + 20 || row.y + row.height > top + height - 20) {
        this.scroller.scrollTop = middle ? row.y - height / 3 : row.y < top + 20 ? row.y - 60 : row.y + row.height - height + 60;
      }
    }
    this.refresh([previous, token]);
    this.draw();
    const place = this.sequence.mediumAt[token];
    const folded = place >= 0 && !this.unfolded.has(place);
    this.scroller.setAttribute("aria-activedescendant", folded ? `m${this.sequence.index}-${place}` : `t${this.sequence.index}-${token}`);
    const cell = document.getElementById(this.scroller.getAttribute("aria-activedescendant"));
    cell?.setAttribute("aria-label", this.events.described(this.sequence, token));
  }

  /** Draw the rows of some tokens again, or all that are in sight. */
  refresh(tokens = null) {
    const places = tokens ? tokens.filter((token) => token >= 0).map((token) => this.rowOf(token)) : [...this.shown.keys()];
    for (const place of places) {
      const shown = this.shown.get(place);
      if (!shown) continue;
      const again = this.row(this.rows[place], place);
      shown.replaceWith(again);
      this.shown.set(place, again);
    }
  }

  /** The same column one line further. */
  vertical(by) {
    const place = this.rowOf(Math.max(this.current, 0));
    const cell = document.getElementById(this.scroller.getAttribute("aria-activedescendant") || "");
    const left = cell ? cell.offsetLeft + cell.offsetWidth / 2 : 0;
    let next = place;
    do next += Math.sign(by);
    while (this.rows[next] && this.rows[next].kind === "head");
    next = Math.abs(by) > 1 ? Math.max(0, Math.min(this.rows.length - 1, place + by)) : next;
    const row = this.rows[next];
    if (!row) return Math.max(this.current, 0);
    let token = row.start, used = 24;
    while (row.kind === "line" && token + 1 < row.stop && used + widthOf(this.sequence.text(token)) < left) used += widthOf(this.sequence.text(token++));
    return Math.min(token, this.sequence.length - 1);
  }

  /** The whole strip in the margin: roles, marks and hits. */
  drawMap() {
    const { map } = this, ratio = devicePixelRatio || 1;
    const width = (map.width = 14 * ratio), height = (map.height = this.scroller.clientHeight * ratio);
    map.style.height = `${this.scroller.clientHeight}px`;
    const pen = map.getContext("2d");
    const scale = height / Math.max(this.height, this.scroller.clientHeight);
    const colours = {};
    for (const row of this.rows) {
      if (row.kind === "head") continue;
      const role = row.kind === "card" ? "image" : this.sequence.sections[row.section]?.role;
      colours[role] ??= this.events.colour(role, this.pane);
      pen.fillStyle = colours[role];
      pen.globalAlpha = row.kind === "card" ? 0.6 : 0.5;
      pen.fillRect(4 * ratio, row.y * scale, 6 * ratio, Math.max(row.height * scale, 0.5));
    }
    pen.globalAlpha = 1;
    const tick = (token) => {
      pen.fillRect(0, this.rows[this.rowOf(token)].y * scale, width, 2 * ratio);
    };
    pen.fillStyle = this.events.variable("--focus", this.pane);
    for (let token = 0; token < this.hits.length; token++) if (this.hits[token] && !this.hits[token - 1]) tick(token);
    pen.fillStyle = this.events.variable("--alert", this.pane);
    for (const token of this.sequence.marked.keys()) tick(token);
  }
}
