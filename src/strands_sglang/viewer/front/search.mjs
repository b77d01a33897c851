// Search over the tokens of all episodes: by text, id or property.

import { count, counted, filterField, h, pane } from "./dom.mjs";
import { searchable } from "./text.mjs";
import { VirtualList } from "./virtual.mjs";

const ROW_HEIGHT = 28; // px
const AT_ONCE = 32; // episodes that are searched before the page may react

const COMPARISON = /^([a-z_]+)\s*(<=|>=|<|>|=|:)\s*(.+)$/i;

/** What a token can be searched by. */
const FIELDS = {
  id: (c, i, { ids }) => ids[c.token[i]],
  position: (c, i, page, position) => position,
  logprob: (c, i) => c.logprob?.[i],
  probability: (c, i) => Math.exp(c.logprob?.[i]),
  advantage: (c, i) => c.advantage?.[i],
  weight: (c, i) => c.weight?.[i],
  gap: (c, i) => c.trainer_logprob?.[i] - c.logprob?.[i],
  turn: (c, i) => c.turn[i],
  writer: (c, i, { writers }) => writers[c.writer[i]],
  version: (c, i, { versions }) => versions[c.version?.[i] - 1],
};

const FLAGS = {
  trained: (c, i) => c.trains?.[i],
  untrained: (c, i) => c.sampled[i] && !c.trains?.[i],
  sampled: (c, i) => c.sampled[i],
  drifted: (c, i) => c.drift?.[i],
};

/** What can be searched for, for people. */
export const HELP =
  "Search for text, or for: id:151645 · position:17 · logprob<-5 · probability<0.1 · advantage>0 · weight>0.1 · gap>0.01 · writer:tool · version:3 · turn:4 · trained · untrained · sampled · drifted";

/** Parse a query into a test of one token, or the text to find, which may have been meant as the property that it names. */
export function parseQuery(query, page) {
  const text = query.trim();
  const flag = FLAGS[text.toLowerCase()];
  if (flag) return { test: flag };
  const [, property, operator, wanted] = COMPARISON.exec(text) ?? [];
  const names = { writer: page.writers, version: page.versions }[property?.toLowerCase()];
  const number = Number(wanted?.replace("−", "-"));
  const field = FIELDS[property?.toLowerCase()];
  if (!field || (names ? !names.includes(wanted) : Number.isNaN(number))) return { text: query, property };
  const compare = {
    "<": (value) => value < number,
    ">": (value) => value > number,
    "<=": (value) => value <= number,
    ">=": (value) => value >= number,
  }[operator];
  const isNear = (value) => Math.abs(value - number) <= (Number.isInteger(value) ? 0 : 1e-4 * Math.abs(number));
  const same = names ? (value) => value === wanted : isNear;
  return { test: (c, i, position) => (compare ?? same)(field(c, i, page, position)) };
}

/** Find what matches in a sequence: a mark per token, and where each match begins. */
export function find(sequence, columns, query) {
  const { tokens, places, vocabulary } = sequence;
  if (query.test) {
    const hits = Uint8Array.from(tokens, (_, i) => (query.test(columns, places[i], i) ? 1 : 0));
    return { hits, starts: [...hits.keys()].filter((i) => hits[i] && !hits[i - 1]) };
  }
  const hits = new Uint8Array(tokens.length);
  const starts = [];
  const wanted = searchable(query.text);
  if (!wanted) return { hits, starts };
  const pieces = Array.from(tokens, (token) => vocabulary.searchable(token));
  const offsets = new Uint32Array(tokens.length + 1);
  for (let i = 0; i < tokens.length; i++) offsets[i + 1] = offsets[i] + pieces[i].length;
  const all = pieces.join("");
  let token = 0;
  for (let at = all.indexOf(wanted); at >= 0; at = all.indexOf(wanted, at + wanted.length)) {
    while (offsets[token + 1] <= at) token++;
    starts.push(token);
    for (let i = token; i < tokens.length && offsets[i] < at + wanted.length; i++) hits[i] = 1;
  }
  return { hits, starts };
}

/**
 * Find what matches in all sequences of an episode: per sequence the first match and the number of them. What sequences
 * share is only in the first. A match is a token, or an occurrence of the text.
 *
 * Without tokens, the text is looked for in what was said.
 */
export function findAll(sequences, body, query) {
  if (!body.length) return query.text ? findSaid(body.said, query.text.toLowerCase()) : [];
  const seen = new Uint8Array(body.length);
  const found = [];
  sequences.forEach((sequence, at) => {
    const { hits, starts } = find(sequence, body.columns, query);
    const matches = query.test ? [...hits.keys()].filter((position) => hits[position]) : starts;
    const own = matches.filter((position) => !seen[sequence.places[position]]);
    for (const position of own) seen[sequence.places[position]] = 1;
    if (own.length) found.push({ sequence: at, position: own[0], many: own.length });
  });
  return found;
}

/** Find a text in what was said. */
function findSaid(said, wanted) {
  const texts = said.map(([, , text]) => text).filter((text) => text.toLowerCase().includes(wanted));
  if (!texts.length) return [];
  const at = texts[0].toLowerCase().indexOf(wanted);
  const many = texts.join("\0").toLowerCase().split(wanted).length - 1;
  return [{ many, text: texts[0].slice(Math.max(0, at - 20), at + 80) }];
}

/** The field, and the list of what it finds. */
export class Finder {
  /** @param {EpisodeView} view */
  constructor(view) {
    this.view = view;
    this.input = filterField("Search the tokens of all episodes", "Search all episodes: text, id:42", () => this.search());
    this.input.addEventListener("keydown", (event) => this.key(event));
    this.told = h("output.matches", { "aria-live": "polite" });
    this.element = h("span.finder", {}, this.input, h("span.help", {}, HELP));
    this.results = pane("viewport.results", "Matches");
    this.results.hidden = true;
    this.list = new VirtualList(this.results, ROW_HEIGHT, (row) => this.link(this.found[row]));
  }

  key(event) {
    if (event.key === "Escape") this.view.parts.strip.focus();
    if (event.key !== "Enter") return;
    event.preventDefault();
    this.next(event.shiftKey ? -1 : 1);
  }

  /** Search all episodes; a newer search ends this one. */
  async search() {
    const { app } = this.view;
    const { episodes } = app.index;
    const query = this.input.value ? parseQuery(this.input.value, { ...app.index, ids: app.vocabulary.ids }) : null;
    this.query = query;
    this.found = [];
    this.unit = query?.test ? ["token"] : ["match", "matches"];
    this.soFar = " so far…";
    this.mark();
    for (let i = 0; query && i < episodes.length; i += AT_ONCE) {
      const bodies = await Promise.all(episodes.slice(i, i + AT_ONCE).map((_, k) => app.load(i + k)));
      if (this.query !== query) return;
      for (const [k, body] of bodies.entries()) {
        const sequences = this.view.flows(body);
        const own = findAll(sequences, body, query);
        this.found.push(...own.map((one) => ({ episode: i + k, text: around(sequences[one.sequence], one.position), ...one })));
      }
      this.show(i + AT_ONCE >= episodes.length ? "" : " so far…");
      await new Promise((resume) => setTimeout(resume));
    }
    if (!query) this.show();
  }

  /** List what is found. */
  show(soFar = "") {
    const { strip } = this.view;
    this.soFar = soFar;
    this.tell();
    this.results.hidden = !this.found.length;
    this.results.style.height = `${Math.min(5, this.found.length) * ROW_HEIGHT + 2}px`;
    this.list.reset(this.found.length);
    if (this.at >= 0) strip.reveal(strip.current); // the list took some of its height
  }

  /** Mark what matches in the open sequence. */
  mark() {
    const { strip, flow, body } = this.view;
    const { hits, starts } = this.query ? find(flow, body.columns, this.query) : { hits: null, starts: [] };
    this.starts = starts;
    this.here = this.query?.test ? hits.reduce((all, hit) => all + hit, 0) : starts.length;
    if (this.query && !body.length) this.here = findAll([], body, this.query)[0]?.many;
    if (hits || strip.hits) strip.mark(hits);
    this.tell();
  }

  /** Which match of the open sequence the current token begins, -1 if none. */
  get at() {
    return this.starts.indexOf(this.view.strip.current);
  }

  /** Say how much is found. */
  tell() {
    const { query, found, here, starts, unit, at, soFar } = this;
    if (!query) return void (this.told.textContent = "");
    const stretch = query.test ? "stretch " : "";
    const shown = at < 0 ? "" : ` (${stretch}${count(at + 1)} of ${count(starts.length)})`;
    const own = `${here ? counted(here, ...unit) : "nothing"} in this ${this.view.body.length ? "sequence" : "episode"}${shown}`;
    const total = found.reduce((all, { many }) => all + many, 0);
    const episodes = new Set(found.map(({ episode }) => episode)).size;
    const unknown = query.property ? ` "${query.property}" is not a property that is known here.` : "";
    this.told.textContent =
      total || soFar
        ? `${own}; ${counted(total, ...unit)} in ${counted(episodes, "episode")}${soFar}`
        : `nothing found in any episode.${unknown} ${HELP}`;
  }

  link(match) {
    return h(
      "a.match",
      { href: `#${addressOf(match)}` },
      h("b", {}, this.view.app.index.episodes[match.episode].id),
      h("span", {}, match.sequence ? `sequence ${match.sequence}` : ""),
      h("span", {}, counted(match.many, ...this.unit)),
      h("span.tokens", {}, match.text),
    );
  }

  /** Go to the next match: in the open sequence, then in the next one with any, and after the last to the first. */
  next(by) {
    if (!this.query) return;
    const { strip, number, sequence, app } = this.view;
    const { starts, found } = this;
    const here = strip.current;
    const at = by > 0 ? starts.find((start) => start > here) : starts.findLast((start) => start < here);
    if (at !== undefined) {
      strip.choose(at);
      this.tell();
    } else if (by > 0 && found.length) {
      const later = found.find((one) => one.episode > number || (one.episode === number && one.sequence > sequence));
      app.go(addressOf(later ?? found[0]));
    }
  }
}

/** The address of a place in an episode, without #. */
export function addressOf({ episode, sequence, position }) {
  return sequence === undefined ? `episode-${episode}` : `episode-${episode}-sequence-${sequence}-token-${position}`;
}

/** The tokens around a match. */
function around(sequence, position) {
  if (!sequence) return "";
  const { tokens, vocabulary } = sequence;
  return Array.from(tokens.slice(Math.max(0, position - 4), position + 12), (token) => vocabulary.entry(token).shown).join("");
}
