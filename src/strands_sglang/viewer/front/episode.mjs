// One episode: its turns, the tokens of a sequence, the conversation next to them, and one token's biography.

import { biography, facts, fate } from "./biography.mjs";
import { PROPERTIES, available, legend } from "./colors.mjs";
import { Conversation } from "./conversation.mjs";
import { count, counted, h, number, onWidth } from "./dom.mjs";
import { scoreCard } from "./score.mjs";
import { Finder, addressOf } from "./search.mjs";
import { Strip } from "./strip.mjs";
import { difference, marks, states, treeRow, treeRows, why } from "./tree.mjs";
import { VirtualList } from "./virtual.mjs";

/** The tokens of a sequence, from the store of an episode, in which each token stands once. */
export function sequenceOf(body, steps) {
  const parts = [];
  const bounds = []; // {turn, start, sampled, stop}: positions in the sequence
  let length = 0;
  for (const [turn, kept] of steps) {
    const { prompt, sampled } = body.turns[turn];
    const stop = sampled[0] + kept;
    const answer = length + prompt[1] - prompt[0];
    bounds.push({ turn, start: length, sampled: answer, stop: answer + kept });
    parts.push(prompt, [sampled[0], stop]);
    length = answer + kept;
  }
  const places = new Int32Array(length);
  let at = 0;
  for (const [start, stop] of parts) for (let place = start; place < stop; place++) places[at++] = place;
  const tokens = Uint32Array.from(places, (place) => body.columns.token[place]);
  return { places, tokens, bounds };
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
    this.color = "writer";
    this.finder = new Finder(this);
    this.element = this.build();
    this.tree = new VirtualList(this.parts.tree, 0, (row) =>
      treeRow(this.treeRows[row], this.body.turns, {
        current: this.turn,
        found: this.found.get(this.body.turns[this.treeRows[row].turn]?.number),
        choose: (turn) => this.openTurn(turn),
      }),
    );
    onWidth(this.parts.tree, () => this.body && this.tree.fit(this.treeRows.length));
    this.strip = new Strip(this.parts.strip, {
      point: (position) => this.describe(position),
      choose: (position) => this.choose(position),
      seen: (position) => this.seen(position),
    });
    this.conversation = new Conversation(this.parts.conversation, (turn) => this.openTurn(turn));
  }

  build() {
    const parts = {
      episode: h("select", { "aria-label": "Episode", onchange: (event) => this.app.go(`episode-${event.target.value}`) }),
      facts: h("p.facts"),
      found: h("div.found"),
      turns: h("button.turns", { type: "button", "aria-expanded": "false", onclick: () => this.foldTurns() }),
      tree: h("div.viewport.tree", { tabindex: "0", role: "group", "aria-label": "Turns" }),
      states: h("details.states"),
      sequence: h("select", { "aria-label": "Sequence", onchange: (event) => this.app.go(`episode-${this.number}-sequence-${event.target.value}`) }),
      color: h("select", { "aria-label": "Color by", onchange: (event) => this.recolor(event.target.value) }),
      score: h("div.score", { tabindex: "0", role: "group", "aria-label": "Score" }),
      legend: h("div.legends"),
      rendered: h("button.render", { type: "button", "aria-pressed": "false", onclick: () => this.toggleRendered(), title: "Read what the model wrote as Markdown, and indent JSON (r)" }, "Render"),
      strip: h("div.viewport.strip", { tabindex: "0", role: "group", "aria-label": "Tokens; arrow keys move" }),
      conversation: h("div.viewport.conversation", { tabindex: "0", role: "group", "aria-label": "Conversation" }),
      life: h("div.life", { tabindex: "0", role: "group", "aria-label": "Biography of the token" }),
    };
    this.parts = parts;
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

  /** Show an episode. @param {{sequence?: number, token?: number, turn?: number, finding?: object}} place */
  async open(number_, place = {}) {
    const { index } = this.app;
    if (this.number !== number_) {
      const body = await this.app.load(number_);
      this.number = number_;
      this.body = body;
      this.head = index.episodes[number_];
      this.found = new Map();
      for (const finding of index.findings) {
        if (finding.episode === number_) this.found.set(finding.turn, (this.found.get(finding.turn) ?? 0) + 1);
      }
      this.fill();
    }
    const wanted = place.sequence ?? (this.sequence !== undefined && this.shown === number_ ? this.sequence : 0);
    this.showSequence(wanted < this.body.sequences.length ? wanted : 0);
    this.shown = number_;
    this.opening = true; // at an address, which stays
    if (place.turn !== undefined && place.token === undefined) this.openTurn(place.turn);
    else if (place.token !== undefined) this.openToken(place.token, place.count);
    else if (this.strip.current < 0 && this.flow.tokens.length) {
      const [first] = this.flow.bounds;
      this.strip.choose(first.sampled < first.stop ? first.sampled : 0);
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
    const { parts, head, body } = this;
    const around = index.episodes.map((_, i) => i).filter((i) => Math.abs(i - this.number) < 100);
    parts.episode.replaceChildren(...around.map((i) => h("option", { value: i, selected: i === this.number, title: index.episodes[i].key }, nameOf(index.episodes[i]))));
    const words = [
      head.outcome,
      `reward ${number(head.reward, 3)}`,
      head.advantage === null ? null : `advantage ${number(head.advantage, 3)}`,
      ...(head.unkept ? [head.unkept] : [counted(head.turns, "turn"), counted(head.tokens, "token")]),
      head.trained === null ? null : `${count(head.trained)} trained`,
      head.note,
    ];
    const score = scoreCard(head, body.score, index.report?.success_threshold);
    parts.score.replaceChildren(...score);
    parts.score.hidden = !score.length;
    parts.facts.replaceChildren(...words.filter(Boolean).map((word) => h("span", {}, word)));
    const own = index.findings.map((finding, i) => [finding, i]).filter(([finding]) => finding.episode === this.number);
    parts.found.replaceChildren(
      ...own.slice(0, 4).map(([finding, i]) => h("a.finding", { href: `#finding-${i + 1}`, title: finding.why }, h("b", {}, finding.title), " ", finding.where)),
      ...(own.length > 4 ? [h("a.finding", { href: "#overview" }, counted(own.length - 4, "more finding"))] : []),
    );
    parts.sequence.replaceChildren(...body.sequences.map(({ name }, i) => h("option", { value: i }, name)));
    const colors = available(body.columns);
    if (!colors.includes(this.color)) this.color = colors[0];
    parts.color.replaceChildren(...colors.map((key) => h("option", { value: key, selected: key === this.color }, PROPERTIES[key].label)));
    this.element.classList.toggle("conversation-only", !body.length && body.said.length > 0);
    this.treeRows = treeRows(body.turns);
    this.turn = -1;
    this.sequence = undefined;
    this.tree.fit(this.treeRows.length);
    parts.turns.textContent = counted(body.turns.length, "turn");
    parts.states.replaceChildren(h("summary", {}, "What the words mean"), biography(states(body.turns)));
  }

  showSequence(at) {
    if (this.sequence === at && this.shown === this.number) return;
    const { body, parts } = this;
    const sequence = body.sequences[at];
    this.sequence = at;
    this.shown = this.number;
    parts.sequence.value = String(at);
    this.flow = sequenceOf(body, body.length && sequence ? sequence.steps : []);
    const headings = this.flow.bounds.flatMap((bound) => this.headings(bound));
    this.strip.show({ ...this.flow, vocabulary: this.app.vocabulary, headings }, (place) => this.classOf(place));
    parts.strip.classList.toggle("blank", !this.flow.tokens.length);
    this.drawLegend();
    const spoken = this.flow.bounds
        .map(({ turn }) => ({ ...body.turns[turn], turn, differs: difference(body.turns, turn) }))
        .filter((entry) => entry.said.length || entry.images?.length);
    const whole = { turn: this.flow.bounds[0]?.turn ?? -1, number: null, said: body.said, images: [] };
    this.conversation.show(
      spoken.length || !body.said.length ? spoken : [whole],
      "No messages: the file holds tokens only, and no tokenizer told its texts. View it with --tokenizer.",
    );
    if (!this.flow.bounds.length) this.conversation.follow(-1);
    parts.life.replaceChildren(h("p.empty", {}, this.flow.tokens.length ? "Point at a token, or move with the arrow keys." : "This episode has no tokens."));
    this.turn = -1;
    if (this.flow.bounds.length) this.follow(0);
    this.finder.mark();
  }

  /** The sequences of an episode. */
  flows(body) {
    const { vocabulary } = this.app;
    return body.length ? body.sequences.map(({ steps }) => ({ ...sequenceOf(body, steps), vocabulary })) : [];
  }

  headings({ turn: at, start, sampled, stop }) {
    const turn = this.body.turns[at];
    const made = [];
    const head = (position, kind, words) =>
      made.push({
        at: position,
        make: () =>
          h(`div.heading.${kind}`, { title: words }, h("b", {}, `Turn ${turn.number}`), kind === "prompt" ? " prompt · " : " answer · ", words),
      });
    if (sampled > start) head(start, "prompt", `${counted(sampled - start, "token")} · ${why(turn)}`);
    if (stop > sampled) {
      const whole = turn.sampled[1] - turn.sampled[0];
      const size = stop - sampled < whole ? `${count(stop - sampled)} of ${counted(whole, "token")}` : counted(whole, "token");
      head(sampled, "answer", [size, turn.finish, ...marks(turn).slice(1)].filter(Boolean).join(" · "));
    }
    return made;
  }

  classOf(place) {
    const { columns } = this.body;
    let name = PROPERTIES[this.color].classOf(columns, place, this.app.index);
    if (this.color === "mask" && columns.trains?.[place] && columns.trains[place] !== this.sequence + 1) name = "elsewhere";
    if (columns.trains?.[place] === this.sequence + 1) name += " learns";
    if (columns.times?.[place] > 1) name += " wrong";
    return name;
  }

  drawLegend() {
    const { columns } = this.body;
    this.parts.legend.replaceChildren(
      legend(this.color, this.app.index, columns),
      ...(columns.trains ? [h("span.legend", {}, h("span.swatch.learns", {}), "trained here")] : []),
    );
  }

  recolor(color) {
    this.color = color;
    this.parts.color.value = color;
    this.strip.recolor((place) => this.classOf(place));
    this.drawLegend();
  }

  nextColor() {
    const colors = available(this.body.columns);
    this.recolor(colors[(colors.indexOf(this.color) + 1) % colors.length]);
    this.app.tell(`Colored by ${PROPERTIES[this.color].label}`);
  }

  /** Show or hide the turns, where the screen is small. */
  foldTurns() {
    const { turns } = this.parts;
    const isOpen = turns.getAttribute("aria-expanded") === "true";
    turns.setAttribute("aria-expanded", String(!isOpen));
    if (!isOpen) this.tree.reveal(this.treeRows.findIndex((entry) => entry.turn === this.turn));
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
    list.reveal(Math.max(0, rows.of(bound.start) - (bound.start < bound.sampled ? 1 : 0)), 0, true);
    this.strip.choose(bound.sampled < bound.stop ? bound.sampled : bound.start, false);
    this.conversation.follow(at);
    this.strip.list.draw();
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
    this.strip.list.reveal(this.strip.rowOf(position), 0.35, true);
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
    const { index, vocabulary } = this.app;
    const token = {
      vocabulary,
      sequence: this.sequence,
      position,
      place: this.flow.places[position],
      turn: stepAt(this.flow.bounds, position).turn,
    };
    const copy = h("button.copy", { type: "button", onclick: (event) => this.copyLink(event.target) }, "Copy link");
    this.parts.life.replaceChildren(copy, biography(facts(index, this.body, token)));
  }

  seen(position) {
    if (this.flow?.bounds.length) this.follow(position);
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
    const row = this.treeRows.findIndex((entry) => entry.turn === turn);
    this.tree.redraw();
    this.tree.reveal(row);
  }
}
