// The episodes of one prompt side by side, aligned at their first difference.

import { counted, h, number, onWidth } from "./dom.mjs";
import { firstDifference, layOut } from "./layout.mjs";
import { columnWidth, tokenSpan } from "./strip.mjs";
import { VirtualList } from "./virtual.mjs";

const ROW_HEIGHT = 23;
const MOST_TOKENS = 1500;

/**
 * Lay sequences out so that their rows are equal up to the first difference, which begins a row in each.
 *
 * @param {{tokens: ArrayLike<number>}[]} lanes
 */
export function align(lanes, measure, limit, most) {
  const at = firstDifference(lanes.map((lane) => lane.tokens));
  const shared = layOut(at, (i) => measure(lanes[0], i), limit, [], most);
  const rows = lanes.map((lane) => {
    const own = layOut(lane.tokens.length - at, (i) => measure(lane, at + i), limit, [], most);
    return { starts: own.starts.map((start) => start + at), stops: own.stops.map((stop) => stop + at) };
  });
  const count = shared.length + Math.max(0, ...rows.map((own) => own.starts.length));
  const range = (lane, row) => {
    if (row < shared.length) return [shared.starts[row], shared.stops[row]];
    const own = rows[lane];
    const k = row - shared.length;
    return k < own.starts.length ? [own.starts[k], own.stops[k]] : null;
  };
  return { at, first: shared.length, count, range };
}

export class Siblings {
  constructor(element, told) {
    this.heads = h("div.lanes.heads", { role: "list" });
    this.viewport = h("div.viewport.aligned", { tabindex: "0", role: "group", "aria-label": "Tokens of the siblings, aligned at their first difference" });
    element.append(this.heads, this.viewport);
    this.told = told;
    this.list = new VirtualList(this.viewport, ROW_HEIGHT, (row) => this.renderRow(row));
    this.viewport.addEventListener("pointerover", (event) => this.on(event, told.point));
    this.viewport.addEventListener("click", (event) => this.on(event, told.choose));
    onWidth(this.viewport, () => this.lanes && this.layOut());
  }

  on(event, tell) {
    const at = event.target.dataset?.at;
    if (at !== undefined) tell(Number(event.target.parentElement.dataset.lane), Number(at));
  }

  /** @param lanes `[{name, reward, advantage, outcome, tokens, places, vocabulary, classOf, open}]` */
  show(lanes) {
    this.lanes = lanes;
    this.folded = true;
    this.viewport.scrollTop = 0;
    this.layOut();
  }

  /** Show the tokens that all have in common, or only the last row of them. */
  fold() {
    this.folded = !this.folded;
    this.layOut();
    this.viewport.querySelector(".fold button").focus();
  }

  layOut() {
    const lanes = this.lanes;
    const width = Math.max(148, Math.floor((this.viewport.clientWidth - 16) / lanes.length));
    const limit = Math.max(8, Math.floor((width - 14) / columnWidth(this.viewport)));
    const visibleRows = Math.ceil(this.viewport.clientHeight / ROW_HEIGHT) + 6;
    const most = Math.max(2, Math.floor(MOST_TOKENS / lanes.length / visibleRows));
    this.limit = limit;
    this.aligned = align(lanes, (lane, i) => lane.vocabulary.entry(lane.tokens[i]), limit, most);
    for (const element of [this.heads, this.list.spacer]) element.style.minWidth = `${width * lanes.length}px`;
    this.heads.replaceChildren(
      ...lanes.map((lane) =>
        h(
          "div.head",
          { role: "listitem" },
          h("button", { type: "button", onclick: lane.open, title: "Open this episode" }, lane.name),
          h("span", {}, `reward ${number(lane.reward, 3)}`),
          lane.advantage !== null && h("span", {}, `advantage ${number(lane.advantage, 3)}`),
          h("span", {}, lane.outcome ?? ""),
        ),
      ),
    );
    const { at, first, count: rows } = this.aligned;
    const isFoldable = first > 1 && rows > first;
    this.before = isFoldable ? (this.folded ? 2 - first : 1) : 0; // rows of the list before those of the tokens
    this.list.reset(rows + this.before);
    this.label = isFoldable ? `${counted(at, "common token")} ${this.folded ? "▸" : "▾"}` : null;
  }

  renderRow(at) {
    if (this.label && at === 0) {
      const button = { type: "button", "aria-expanded": String(!this.folded), onclick: () => this.fold() };
      return h("div.fold", {}, h("button", button, this.label));
    }
    const row = at - this.before;
    const line = h(`div.lanes${row === this.aligned.first ? ".difference" : ""}`);
    this.lanes.forEach((lane, k) => {
      const cell = document.createElement("div");
      cell.className = "tokens lane";
      cell.dataset.lane = k;
      const [start, stop] = this.aligned.range(k, row) ?? [0, 0];
      for (let i = start; i < stop; i++) cell.append(tokenSpan(lane.vocabulary.entry(lane.tokens[i]), lane.classOf(lane.places[i]), i, this.limit));
      line.append(cell);
    });
    return line;
  }

  /** In words: where the siblings differ first. */
  get summary() {
    const { at } = this.aligned;
    const episodes = counted(this.lanes.length, "episode");
    if (this.lanes.every((lane) => lane.tokens.length === at)) return `${episodes} with the same ${counted(at, "token")}`;
    return `${episodes}, equal in the first ${counted(at, "token")}; the marked row begins at the first difference`;
  }
}
