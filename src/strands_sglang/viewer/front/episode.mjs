// One episode: its turns, the tokens of a sequence, the conversation next to them, and one token's biography.

import { facts, fate } from "./biography.mjs";
import { PROPERTIES, available, colorOptions, legend } from "./colors.mjs";
import { Conversation } from "./conversation.mjs";
import { count, counted, definitions, h, near, number, options, pane } from "./dom.mjs";
import { rowOf } from "./layout.mjs";
import { outcomeChip, rewardChip } from "./score.mjs";
import { Finder, addressOf } from "./search.mjs";
import { Strip } from "./strip.mjs";
import { difference, marks, states, treeRow, treeRows } from "./tree.mjs";

/** The tokens of a sequence, from the store of an episode, in which each token stands once. */
export function sequenceOf(body, steps) {
  const places = [];
  const bounds = []; // {turn, start, sampled, stop}: positions in the sequence
  for (const [turn, kept] of steps) {
    const { prompt, sampled } = body.turns[turn];
    const start = places.length;
    for (let place = prompt[0]; place < sampled[0] + kept; place++) places.push(place);
    bounds.push({ turn, start, sampled: places.length - kept, stop: places.length });
  }
  return { places, tokens: places.map((place) => body.columns.token[place]), bounds, vocabulary: body.vocabulary };
}

/** The step of a sequence that holds a position. */
export function stepAt(bounds, position) {
  return bounds.findLast(({ start }) => start <= position) ?? bounds[0];
}

/** An episode with how it ended. */
function nameOf({ id, outcome, reward }) {
  return [id, outcome?.replaceAll("_", " "), reward !== null && `reward ${number(reward, 3)}`].filter(Boolean).join(" · ");
}

export class EpisodeView {
  /** @param {{index: object, vocabulary: Vocabulary, load: (i: number) => Promise<object>, go: Function, tell: Function}} app */
  constructor(app) {
    this.app = app;
    this.finder = new Finder(this);
    this.element = this.build();
    this.strip = new Strip(this.parts.strip, {
      point: (position) => this.describe(position),
      choose: (position) => this.choose(position),
      seen: (position) => this.flow.bounds.length && this.follow(position),
    });
    this.conversation = new Conversation(this.parts.conversation, (turn) => this.openTurn(turn));
  }

  build() {
    const parts = (this.parts = {
      episode: h("select", { "aria-label": "Episode", onchange: (event) => this.app.go(`episode-${event.target.value}`) }),
      facts: h("p.facts"),
      found: h("div.found"),
      turns: h("button.turns", { type: "button", "aria-expanded": "false", onclick: () => this.foldTurns() }),
      tree: pane("viewport.tree", "Turns"),
      states: h("details.states"),
      sequence: h("select", { "aria-label": "Sequence", onchange: (event) => this.app.go(`episode-${this.number}-sequence-${event.target.value}`) }),
      color: h("select", { "aria-label": "Color by", onchange: () => this.recolor() }),
      score: pane("score", "Score"),
      legend: h("div.bar.legends"),
      rendered: h("button.render", { type: "button", "aria-pressed": "false", onclick: () => this.toggleRendered(), title: "Read what the model wrote as Markdown, and indent JSON (r)" }, "Render"),
      strip: pane("viewport.strip", "Tokens; arrow keys move"),
      conversation: pane("viewport.conversation", "Conversation"),
      life: pane("life", "Biography of the token"),
    });
    return h(
      "section.episode",
      { "aria-label": "Episode" },
      h("aside.side", { "aria-label": "Turns of the episode" }, h("div.choose", {}, parts.episode), parts.facts, parts.found, parts.turns, parts.tree, parts.states),
      h(
        "div.work",
        {},
        h("div.bar", {}, parts.sequence, h("label", {}, "color ", parts.color), parts.rendered, this.finder.element),
        this.finder.told,
        this.finder.results,
        parts.score,
        parts.legend,
        h("div.panes", {}, parts.strip, parts.conversation),
        parts.life,
      ),
    );
  }

  /** Show an episode. @param {{sequence?: number, token?: number, turn?: number, count?: number}} place */
  async open(at = this.number ?? 0, { sequence, turn, token, count: many } = {}) {
    const body = await this.app.load(at);
    if (this.number !== at) {
      this.number = at;
      this.body = body;
      this.fill();
    }
    const wanted = sequence ?? this.sequence ?? 0;
    this.showSequence(wanted < body.sequences.length ? wanted : 0);
    this.opening = true; // at an address, which stays
    if (token !== undefined) this.openToken(token, many);
    else if (turn !== undefined) this.openTurn(turn);
    else if (this.strip.current < 0 && this.flow.tokens.length) {
      const isScored = this.app.index.episodes[at].key !== null; // then its final answer matters most
      const { start, sampled, stop } = this.flow.bounds.at(isScored ? -1 : 0);
      this.strip.choose(sampled < stop ? sampled : start);
    }
    this.opening = false;
  }

  /** The parts of an address that the episode does not have. */
  absent({ sequence, turn, token }) {
    const { sequences, turns } = this.body;
    const lengths = { sequence: sequences.length, turn: turns.length, token: this.flow.tokens.length };
    return Object.entries({ sequence, turn, token })
      .filter(([name, at]) => at >= lengths[name])
      .map(([name, at]) => `${name} ${at}`);
  }

  fill() {
    const { index } = this.app;
    const { parts, body } = this;
    const head = index.episodes[this.number];
    const names = near(index.episodes.map((episode, i) => [i, nameOf(episode)]), this.number);
    parts.episode.replaceChildren(...options(names, this.number));
    const words = [
      head.outcome,
      `reward ${number(head.reward, 3)}`,
      head.advantage !== null && `advantage ${number(head.advantage, 3)}`,
      ...(head.unkept ? [head.unkept] : [counted(head.turns, "turn"), counted(head.tokens, "token")]),
      head.trained !== null && `${count(head.trained)} trained`,
      head.note,
    ];
    const chips = [rewardChip(head.reward, index.report?.success_threshold), " ", outcomeChip(head.outcome)];
    parts.score.replaceChildren(h("p", {}, h("b", {}, "Score "), ...chips), definitions(body.score));
    parts.score.hidden = !body.score.length;
    parts.facts.replaceChildren(...words.filter(Boolean).map((word) => h("span", {}, word)));
    const own = index.findings.map((finding, i) => [finding, i]).filter(([finding]) => finding.episode === this.number);
    parts.found.replaceChildren(
      ...own.slice(0, 4).map(([finding, i]) => h("a.finding", { href: `#finding-${i + 1}`, title: finding.why }, h("b", {}, finding.title), " ", finding.where)),
      ...(own.length > 4 ? [h("a.finding", { href: "#overview" }, counted(own.length - 4, "more finding"))] : []),
    );
    parts.sequence.replaceChildren(...options(body.sequences.map(({ name }, i) => [i, name])));
    colorOptions(parts.color, [body.columns]);
    this.element.classList.toggle("conversation-only", !body.length && body.said.length > 0);
    this.sequence = this.turn = undefined;
    const found = new Map();
    for (const [{ turn }] of own) found.set(turn, (found.get(turn) ?? 0) + 1);
    parts.tree.replaceChildren(...treeRows(body.turns).map((row) => treeRow(row, body.turns, { found, choose: (turn) => this.openTurn(turn) })));
    parts.turns.textContent = counted(body.turns.length, "turn");
    parts.states.replaceChildren(h("summary", {}, "What the words mean"), definitions(states(body.turns)));
  }

  showSequence(at) {
    if (this.sequence === at) return;
    const { body, parts } = this;
    this.sequence = at;
    parts.sequence.value = String(at);
    this.flow = sequenceOf(body, body.length ? body.sequences[at].steps : []);
    const headings = this.flow.bounds.flatMap((bound) => this.headings(bound));
    this.strip.show({ ...this.flow, headings }, (place) => this.classOf(place));
    this.drawLegend();
    const spoken = this.flow.bounds
      .map(({ turn }) => ({ ...body.turns[turn], turn, differs: difference(body.turns, turn) }))
      .filter((entry) => entry.said.length || entry.images.length);
    const whole = { turn: this.flow.bounds[0]?.turn, number: null, said: body.said, images: [] };
    this.conversation.show(
      spoken.length || !body.said.length ? spoken : [whole],
      "No messages: the file holds tokens only, and no tokenizer told its texts. View it with --tokenizer.",
    );
    parts.life.replaceChildren(h("p.empty", {}, "This episode has no tokens."));
    if (this.flow.bounds.length) this.follow(0);
    else this.conversation.showAnswer();
    this.finder.mark();
  }

  /** The sequences of an episode. */
  flows(body) {
    return body.length ? body.sequences.map(({ steps }) => sequenceOf(body, steps)) : [];
  }

  headings({ turn: at, start, sampled, stop }) {
    const turn = this.body.turns[at];
    const made = [];
    const head = (position, kind, words) => {
      const make = () => h(`div.heading.${kind}`, { title: words }, h("b", {}, `Turn ${turn.number}`), ` ${kind} · `, words);
      made.push({ at: position, make });
    };
    if (sampled > start) head(start, "prompt", `${counted(sampled - start, "token")} · ${turn.reason}`);
    if (stop > sampled) {
      const whole = turn.sampled[1] - turn.sampled[0];
      const size = stop - sampled < whole ? `${count(stop - sampled)} of ${counted(whole, "token")}` : counted(whole, "token");
      head(sampled, "answer", [size, turn.finish, ...marks(turn).slice(1)].filter(Boolean).join(" · "));
    }
    return made;
  }

  classOf(place) {
    const { columns } = this.body;
    const { value: color } = this.parts.color;
    const trains = columns.trains?.[place];
    let name = PROPERTIES[color].classOf(columns, place, this.app.index);
    if (color === "mask" && trains && trains !== this.sequence + 1) name = "elsewhere";
    if (trains === this.sequence + 1) name += " learns";
    if (columns.times?.[place] > 1) name += " wrong";
    return name;
  }

  drawLegend() {
    const { columns } = this.body;
    const trained = h("span.legend", {}, h("span.swatch.learns"), "trained here");
    this.parts.legend.replaceChildren(legend(this.parts.color.value, this.app.index, columns), columns.trains ? trained : "");
  }

  recolor() {
    this.strip.list.redraw();
    this.drawLegend();
  }

  nextColor() {
    const { color } = this.parts;
    color.selectedIndex = (color.selectedIndex + 1) % color.length;
    this.recolor();
    this.app.tell(`Colored by ${color.selectedOptions[0].text}`);
  }

  /** Show or hide the turns, where the screen is small. */
  foldTurns() {
    const { turns } = this.parts;
    const isOpen = turns.getAttribute("aria-expanded") === "true";
    turns.setAttribute("aria-expanded", String(!isOpen));
    if (!isOpen) this.revealTurn();
  }

  toggleRendered() {
    const rendered = !this.conversation.rendered;
    this.parts.rendered.setAttribute("aria-pressed", String(rendered));
    this.conversation.render(rendered);
    this.app.tell(rendered ? "The model's text is rendered" : "Everything is shown as it was said");
  }

  /** Choose the sequence that holds a turn, and show where it begins. */
  openTurn(at) {
    const holds = (sequence) => sequence.steps.some(([turn]) => turn === at);
    if (!holds(this.body.sequences[this.sequence])) {
      const other = this.body.sequences.findIndex(holds);
      if (other >= 0) this.showSequence(other);
    }
    const bound = this.flow.bounds.find((one) => one.turn === at);
    if (!bound) return;
    this.setTurn(at);
    const { rows, list } = this.strip;
    list.reveal(Math.max(0, rowOf(rows, bound.start) - (bound.start < bound.sampled ? 1 : 0)), 0, true);
    this.strip.choose(bound.sampled < bound.stop ? bound.sampled : bound.start, false);
    this.conversation.follow(at);
    list.draw();
  }

  nextTurn(by) {
    const { bounds } = this.flow;
    const at = bounds.findIndex((bound) => bound.turn === this.turn);
    const next = bounds[at + by];
    if (next) this.openTurn(next.turn);
  }

  /** Show a token of the sequence, and mark `many` from it on. */
  openToken(position, many) {
    if (!this.flow.tokens.length) return;
    if (many !== undefined) this.strip.mark(new Uint8Array(this.flow.tokens.length).fill(1, position, position + Math.max(1, many)));
    this.strip.choose(position);
    this.strip.reveal(position, 0.35, true);
    this.finder.tell();
    this.parts.strip.focus({ preventScroll: true });
    for (const part of [this.parts.life, this.parts.strip]) part.scrollIntoView({ block: "nearest" }); // on a phone
  }

  choose(position) {
    this.follow(position);
    if (!this.opening) this.readdress();
    this.describe(position);
    const place = this.flow.places[position];
    const { vocabulary } = this.app;
    const entry = this.body.columns.token[place];
    this.app.tell(`${vocabulary.entry(entry).shown}, id ${vocabulary.ids[entry]}, trained: ${fate(this.app.index, this.body, this.sequence, place)}`);
  }

  /** The address of the chosen token. */
  get address() {
    return `#${addressOf({ episode: this.number, sequence: this.sequence, position: this.strip.current })}`;
  }

  /** Let the address of the page follow the chosen token, once it stays: browsers allow few changes per second. */
  readdress() {
    const before = location.hash;
    clearTimeout(this.waiting);
    this.waiting = setTimeout(() => location.hash === before && history.replaceState(null, "", this.address), 200);
  }

  async copyLink(button) {
    history.replaceState(null, "", this.address);
    const copied = navigator.clipboard?.writeText(location.href) ?? Promise.reject();
    button.textContent = await copied.then(() => "Copied", () => "The link is in the address bar");
  }

  describe(position) {
    const { body, flow, sequence } = this;
    const { turn } = stepAt(flow.bounds, position);
    const token = { vocabulary: flow.vocabulary, sequence, position, place: flow.places[position], turn };
    const copy = h("button.copy", { type: "button", onclick: (event) => this.copyLink(event.target) }, "Copy link");
    this.parts.life.replaceChildren(copy, definitions(facts(this.app.index, body, token)));
  }

  /** Let the tree and the conversation follow the tokens. */
  follow(position) {
    const { turn, sampled } = stepAt(this.flow.bounds, position);
    this.setTurn(turn);
    this.conversation.follow(turn, position >= sampled);
  }

  setTurn(turn) {
    if (turn === this.turn) return;
    this.turn = turn;
    for (const button of this.parts.tree.querySelectorAll(".turn")) {
      const isChosen = button.dataset.turn === String(turn);
      button.classList.toggle("chosen", isChosen);
      button.ariaCurrent = String(isChosen);
      button.tabIndex = isChosen ? 0 : -1;
    }
    this.revealTurn();
  }

  /** Bring the current turn into view. */
  revealTurn() {
    const { tree } = this.parts;
    const { offsetTop, offsetHeight } = tree.querySelector(".chosen") ?? tree;
    const isSeen = offsetTop >= tree.scrollTop && offsetTop + offsetHeight <= tree.scrollTop + tree.clientHeight;
    if (!isSeen) tree.scrollTop = offsetTop - 0.3 * tree.clientHeight;
  }
}
