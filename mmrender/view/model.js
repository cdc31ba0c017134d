// What the page shows: sequences of tokens with everything that is aligned to them.
const data = JSON.parse(document.getElementById("data").textContent);
const CONTENT = new Set(["content", "reasoning", "tool_call", "name", "extra", "tools", "documents", "prompt", "completion"]);
const BREAK = "⏎";

/** One sequence; every array has an entry a token. */
class Sequence {
  constructor(raw, index) {
    const count = raw.ids.length;
    Object.assign(this, { index, name: raw.name, notes: raw.notes, sections: raw.sections, media: raw.media });
    this.length = count;
    this.ids = Int32Array.from(raw.ids);
    this.raw = raw;
    this.spans = raw.spans;
    this.spanOf = new Uint32Array(count);
    raw.spans.forEach(([start, stop], place) => this.spanOf.fill(place, start, stop));
    this.trained = null;
    if (raw.trained) {
      this.trained = new Uint8Array(count);
      for (const [start, stop] of raw.trained) this.trained.fill(1, start, stop);
    }
    this.mediumAt = new Int32Array(count).fill(-1);
    // A sound track has the range of its video, which comes first.
    raw.media.forEach((medium, place) => this.mediumAt[medium.start] < 0 && this.mediumAt.fill(place, medium.start, medium.stop));
    this.values = {};
    for (const [name, runs] of Object.entries(raw.values)) {
      const values = (this.values[name] = new Array(count));
      for (const [start, run] of Object.entries(runs)) run.forEach((value, offset) => (values[+start + offset] = value));
    }
    const { sampler, trainer } = this.values;
    if (sampler && trainer) {
      this.values.difference = Array.from(trainer, (value, place) =>
        value === undefined || sampler[place] === undefined ? undefined : value - sampler[place]);
    }
    this.differs = raw.differs || [0, 0];
    this.marks = data.marks.filter((mark) => mark.strip === index);
    this.marked = new Map(this.marks.map((mark) => [mark.token, mark]));
  }

  /** Text of a token; an id in brackets where no text is known, a dot where the token before holds it. */
  text(token) {
    if (!this.raw.texts) return `${this.ids[token]}`;
    const text = this.raw.odd[token] ?? this.raw.vocabulary[this.ids[token]];
    return text === "" ? "·" : text;
  }

  span(token) {
    const [, , message, kind, sampled] = this.spans[this.spanOf[token]] || [0, 0, -1, "template", false];
    return { message, kind, sampled };
  }

  /** Index of the section that a token lies in, -1 before the first. */
  section(token) {
    let low = 0, high = this.sections.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.sections[middle].start <= token) low = middle + 1;
      else high = middle;
    }
    return low - 1;
  }

  sectionStop(place) {
    return place + 1 < this.sections.length ? this.sections[place + 1].start : this.length;
  }

  /** Where in its medium a token looks: the feature's number, and frame, row and column where known. */
  patch(token) {
    const place = this.mediumAt[token];
    if (place < 0) return null;
    const medium = this.media[place];
    const offset = token - medium.start;
    let feature = medium.features ? -1 : offset;
    let before = 0;
    for (const [start, stop] of medium.features || []) {
      if (offset >= start && offset < stop) feature = before + offset - start;
      before += stop - start;
    }
    if (feature < 0 || !medium.grid) return { medium, feature };
    const [, rows, columns] = medium.grid;
    const inFrame = feature % (rows * columns);
    return { medium, feature, frame: Math.floor(feature / (rows * columns)), row: Math.floor(inFrame / columns), column: inFrame % columns };
  }

  /** The token that looks at a patch. */
  tokenAt(place, frame, row, column) {
    const medium = this.media[place];
    const [, rows, columns] = medium.grid;
    let feature = (frame * rows + row) * columns + column;
    for (const [start, stop] of medium.features || []) {
      if (feature < stop - start) return medium.start + start + feature;
      feature -= stop - start;
    }
    return medium.start + feature;
  }

  /** Tokens [start, stop) that hold a text, or an id; text is compared without regard to case. */
  find(query) {
    const found = [];
    if (/^\d+$/.test(query)) {
      const wanted = +query;
      for (let token = 0; token < this.length; token++) {
        if (this.ids[token] !== wanted) continue;
        const place = this.mediumAt[token];
        found.push([token, place < 0 ? token + 1 : this.media[place].stop]);
        if (place >= 0) token = this.media[place].stop - 1;
      }
    }
    if (!this.raw.texts) return found;
    if (!this.whole) {
      const pieces = [];
      this.starts = new Uint32Array(this.length + 1);
      let length = 0;
      for (let token = 0; token < this.length; token++) {
        this.starts[token] = length;
        const folded = this.mediumAt[token] >= 0 && this.media[this.mediumAt[token]].start !== token;
        const text = folded || this.text(token) === "·" ? "" : this.text(token).toLowerCase();
        pieces.push(text);
        length += text.length;
      }
      this.starts[this.length] = length;
      this.whole = pieces.join("");
    }
    const wanted = query.replaceAll("\n", BREAK).toLowerCase();
    for (let at = this.whole.indexOf(wanted); at >= 0 && found.length < 10000; at = this.whole.indexOf(wanted, at + wanted.length)) {
      found.push([this.tokenOf(at), this.tokenOf(at + wanted.length - 1) + 1]);
    }
    return found.sort((one, other) => one[0] - other[0]);
  }

  tokenOf(character) {
    let low = 0, high = this.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.starts[middle] <= character) low = middle + 1;
      else high = middle;
    }
    return low - 1;
  }
}

const sequences = data.strips.map((raw, index) => new Sequence(raw, index));

/** Classes 0 to 4 and -1 to -4 for a number, by what it measures; null where there is none. */
const SCALES = {
  sampler: { label: "Log-prob", steps: ["p > 0.9", "> 0.5", "> 0.1", "> 0.01", "less"], bin: (value) => [-0.105, -0.693, -2.303, -4.605].filter((edge) => value < edge).length },
  difference: { label: "Difference", steps: ["< 0.001", "< 0.01", "< 0.1", "< 1", "1 nat or more"], signed: true, bin: (value) => [1e-3, 1e-2, 1e-1, 1].filter((edge) => !(Math.abs(value) < edge)).length },
};
for (const [name, label] of [["advantage", "Advantage"], ["reward", "Reward"], ["weight", "Weight"]]) {
  const all = sequences.flatMap((sequence) => sequence.values[name] || []);
  const largest = all.reduce((most, value) => Math.max(most, Math.abs(value) || 0), 0);
  SCALES[name] = { label, steps: ["0", "", "", "", largest.toPrecision(3)], signed: true, bin: (value) => (value ? Math.ceil((Math.abs(value) / largest) * 4) || 4 : 0) };
}

function scaled(name, value) {
  if (value === undefined) return null;
  const scale = SCALES[name];
  const bin = typeof value === "number" && Number.isFinite(value) ? scale.bin(value) : 4;
  return scale.signed && value < 0 && bin ? -bin : bin;
}

function element(name, properties = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(properties)) {
    if (key in made && key !== "role") made[key] = value;
    else made.setAttribute(key, value);
  }
  made.append(...children);
  return made;
}

const number = (value) => value.toLocaleString("en");
