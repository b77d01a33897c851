// The episodes of one prompt side by side, aligned at their first difference.

import { PROPERTIES, available, colorOptions, legend } from "./colors.mjs";
import { counted, h, near, number, onWidth, options, pane } from "./dom.mjs";
import { sequenceOf } from "./episode.mjs";
import { firstDifference, layOut } from "./layout.mjs";
import { columnWidth, tokenSpan } from "./strip.mjs";
import { VirtualList } from "./virtual.mjs";

const ROW_HEIGHT = 23;
const MOST_TOKENS = 1500;
const MOST_LANES = 16;

/** Lay sequences out so that their rows are equal up to the first difference, which begins a row in each. */
export function align(lanes, measure, limit, most) {
  const at = firstDifference(lanes.map((lane) => lane.tokens));
  const rows = (lane, from, to) => {
    const own = layOut(to - from, (i) => measure(lane, from + i), limit, [], most);
    return own.map(({ start, stop }) => [from + start, from + stop]);
  };
  const shared = rows(lanes[0], 0, at);
  const own = lanes.map((lane) => rows(lane, at, lane.tokens.length));
  const first = shared.length;
  const range = (lane, row) => shared[row] ?? own[lane][row - first];
  return { at, first, count: first + Math.max(...own.map((those) => those.length)), range };
}

export class Siblings {
  constructor(app) {
    this.app = app;
    this.color = h("select", { "aria-label": "Color by", onchange: () => this.open(this.at) });
    this.group = h("select", { "aria-label": "Group", onchange: (event) => app.go(`siblings-${event.target.value}`) });
    this.summary = h("p.caption");
    this.legend = h("span");
    this.heads = h("div.lanes.heads", { role: "list" });
    this.viewport = pane("viewport.aligned", "Tokens of the siblings, aligned at their first difference");
    this.body = h("div.aligned-body", {}, this.heads, this.viewport);
    this.life = h("p.caption.pointed");
    const bar = h("div.bar", {}, this.group, h("label", {}, "color ", this.color), this.legend);
    this.element = h("section.siblings", { "aria-label": "Siblings" }, bar, this.summary, this.body, this.life);
    this.list = new VirtualList(this.viewport, ROW_HEIGHT, (row) => this.renderRow(row));
    this.viewport.addEventListener("pointerover", (event) => this.on(event, (lane, at) => this.describe(lane, at)));
    this.viewport.addEventListener("click", (event) => this.on(event, (lane, at) => app.go(`episode-${lane.episode}-sequence-0-token-${at}`)));
    onWidth(this.viewport, () => this.lanes?.length > 1 && this.layOut());
  }

  on(event, tell) {
    const at = event.target.dataset?.at;
    if (at !== undefined) tell(this.lanes[event.target.parentElement.dataset.lane], Number(at));
  }

  async open(at = this.at ?? Math.max(0, this.app.index.groups.findIndex((group) => group.episodes.length > 1))) {
    const { app } = this;
    const { groups } = app.index;
    this.at = at;
    this.group.replaceChildren(...options(near(groups.map(({ name }, i) => [i, name]), at), at));
    const own = groups[at].episodes;
    const bodies = await Promise.all(own.slice(0, MOST_LANES).map((i) => app.load(i)));
    const chosen = colorOptions(this.color, bodies.map(({ columns }) => columns));
    this.lanes = bodies
      .map((body, k) => ({ body, head: app.index.episodes[own[k]], episode: own[k] }))
      .filter(({ body }) => body.length && body.sequences.length)
      .map((lane) => ({
        ...lane,
        ...sequenceOf(lane.body, lane.body.sequences[0].steps),
        columns: lane.body.columns,
        classOf: available(lane.body.columns).includes(chosen) ? PROPERTIES[chosen].classOf : () => "",
      }));
    this.body.hidden = this.lanes.length < 2;
    if (this.lanes.length < 2) {
      this.summary.textContent = "This prompt has one episode with tokens; siblings need two.";
      return;
    }
    const shown = this.lanes.find(({ columns }) => available(columns).includes(chosen));
    this.legend.replaceChildren(shown ? legend(chosen, app.index, shown.columns) : "");
    this.folded = true;
    this.viewport.scrollTop = 0;
    this.layOut();
    const more = own.length - bodies.length;
    const { target } = app.index.episodes[own[0]];
    this.summary.textContent = [this.told, more > 0 && `${more} more episodes are not shown here`, target && `target: ${target}`].filter(Boolean).join("; ");
  }

  entry(lane, at) {
    return this.app.vocabulary.entry(lane.tokens[at]);
  }

  describe(lane, at) {
    const logprob = lane.columns.logprob?.[lane.places[at]] ?? NaN;
    const known = Number.isNaN(logprob) ? "" : ` · logprob ${logprob.toFixed(3)}`;
    const id = this.app.vocabulary.ids[lane.tokens[at]];
    this.life.replaceChildren(h("b", {}, lane.head.id), `: ${this.entry(lane, at).shown} · id ${id} · token ${at}${known}`);
  }

  /** Show the tokens that all have in common, or only the last row of them. */
  fold() {
    this.folded = !this.folded;
    this.layOut();
    this.viewport.querySelector(".fold button").focus();
  }

  layOut() {
    const { lanes } = this;
    const width = Math.max(132, Math.floor((this.viewport.clientWidth - 16) / lanes.length));
    const visibleRows = Math.ceil(this.viewport.clientHeight / ROW_HEIGHT) + 6;
    const most = Math.max(2, Math.floor(MOST_TOKENS / lanes.length / visibleRows));
    this.limit = Math.max(8, Math.floor((width - 14) / columnWidth(this.viewport)));
    this.aligned = align(lanes, (lane, i) => this.entry(lane, i), this.limit, most);
    for (const element of [this.heads, this.list.spacer]) element.style.minWidth = `${width * lanes.length}px`;
    this.heads.replaceChildren(
      ...lanes.map(({ head, episode }) =>
        h(
          "div.head",
          { role: "listitem" },
          h("button", { type: "button", onclick: () => this.app.go(`episode-${episode}`), title: "Open this episode" }, head.id),
          h("span", {}, `reward ${number(head.reward, 3)}`),
          head.advantage !== null && h("span", {}, `advantage ${number(head.advantage, 3)}`),
          h("span", {}, head.outcome),
        ),
      ),
    );
    const { at, first, count: rows } = this.aligned;
    const isFoldable = first > 1 && rows > first;
    this.before = isFoldable ? (this.folded ? 2 - first : 1) : 0; // rows of the list before those of the tokens
    this.label = isFoldable ? `${counted(at, "common token")} ${this.folded ? "▸" : "▾"}` : null;
    this.list.reset(rows + this.before);
  }

  renderRow(at) {
    if (this.label && at === 0) {
      const button = { type: "button", "aria-expanded": String(!this.folded), onclick: () => this.fold() };
      return h("div.fold", {}, h("button", button, this.label));
    }
    const row = at - this.before;
    const line = h(`div.lanes${row === this.aligned.first ? ".difference" : ""}`);
    this.lanes.forEach((lane, k) => {
      const cell = h("div.tokens.lane", { "data-lane": k });
      const [start, stop] = this.aligned.range(k, row) ?? [0, 0];
      for (let i = start; i < stop; i++) {
        const learns = lane.columns.trains?.[lane.places[i]] === 1 ? " learns" : "";
        const name = lane.classOf(lane.columns, lane.places[i], this.app.index) + learns;
        cell.append(tokenSpan(this.entry(lane, i), name, i, this.limit));
      }
      line.append(cell);
    });
    return line;
  }

  /** In words: where the siblings differ first. */
  get told() {
    const { at } = this.aligned;
    const episodes = counted(this.lanes.length, "episode");
    if (this.lanes.every((lane) => lane.tokens.length === at)) return `${episodes} with the same ${counted(at, "token")}`;
    return `${episodes}, equal in the first ${counted(at, "token")}; the marked row begins at the first difference`;
  }
}
