// The conversation as people read it: messages with Markdown, tool calls and results as cards, images.

import { count, h } from "./dom.mjs";
import { markdown } from "./markdown.mjs";

const MOST_NODES = 1000; // in the document at a time, texts included
const LONGEST = 6000; // characters of a part before it is folded

export class Conversation {
  /**
   * @param {HTMLElement} viewport
   * @param {(turn: number, part: string) => void} choose told the turn whose message is clicked
   */
  constructor(viewport, choose) {
    this.viewport = viewport;
    this.choose = choose;
    this.turns = [];
  }

  /** Show the messages of a path of turns: `[{turn, number, said, images}]`, `said` being `[role, kind, text, name]`. */
  show(turns, empty) {
    this.turns = turns;
    this.empty = empty;
    this.range = null;
    this.viewport.replaceChildren();
    this.current = -1;
    if (!turns.length) this.viewport.append(h("p.empty", {}, empty));
  }

  /** Bring the messages of a turn into view, in step with the tokens. */
  follow(turn) {
    const at = this.turns.findIndex((entry) => entry.turn === turn);
    if (at < 0 || at === this.current) return;
    this.current = at;
    const [first, last] = this.range ?? [0, -1];
    const nearEdge = (at === first && first > 0) || (at === last && last < this.turns.length - 1);
    if (at < first || at > last || nearEdge) this.draw(at);
    for (const element of this.viewport.querySelectorAll(".messages.now")) element.classList.remove("now");
    const own = this.viewport.querySelector(`[data-turn="${turn}"]`);
    if (own) {
      own.classList.add("now");
      this.viewport.scrollTop = own.offsetTop - 8;
    }
  }

  /** Draw the turns around one, as many as the budget of nodes allows. */
  draw(at) {
    let left = MOST_NODES;
    const made = new Map();
    const order = [at];
    for (let k = 1; k < 30; k++) order.push(at + k, at - k);
    let [first, last] = [at, at];
    for (const k of order) {
      if (k < 0 || k >= this.turns.length || k < first - 1 || k > last + 1) continue;
      const section = this.section(this.turns[k]);
      const size = nodes(section);
      if (made.size && size > left) break;
      left -= size;
      made.set(k, section);
      first = Math.min(first, k);
      last = Math.max(last, k);
    }
    this.range = [first, last];
    const shown = [...made.keys()].sort((a, b) => a - b).map((k) => made.get(k));
    const more = (k, label) => h("button.more", { type: "button", onclick: () => this.choose(this.turns[k].turn) }, label);
    this.viewport.replaceChildren(
      ...(first > 0 ? [more(first - 1, `↑ ${count(first)} earlier turns`)] : []),
      ...shown,
      ...(last < this.turns.length - 1 ? [more(last + 1, `↓ ${count(this.turns.length - 1 - last)} later turns`)] : []),
    );
  }

  section({ turn, number, said, images }) {
    const section = h("section.messages", { "data-turn": turn, "aria-label": number === null ? "Episode" : `Turn ${number}`, onclick: () => this.choose(turn) });
    if (number !== null) section.append(h("p.turn-name", {}, `Turn ${number}`));
    let pictures = [...(images ?? [])];
    for (const part of said) {
      section.append(card(part, part[1] === "image" ? pictures.shift() : null));
      if (nodes(section) > MOST_NODES) {
        section.append(h("p.empty", {}, "The rest of this turn is in its tokens."));
        pictures = [];
        break;
      }
    }
    for (const picture of pictures) section.append(card(["user", "image", "", ""], picture));
    return section;
  }
}

function nodes(element) {
  let total = 0;
  const walker = document.createTreeWalker(element, NodeFilter.SHOW_ALL);
  while (walker.nextNode()) total++;
  return total;
}

/** One part of a message. */
export function card([role, kind, text, name], picture) {
  if (kind === "image") {
    const shown = picture?.url
      ? h("img", { src: picture.url, alt: picture.where || "image of the prompt" })
      : h("p.empty", {}, "an image that the file does not hold");
    return h("article.card.image", {}, h("header", {}, `${role} · image`), shown);
  }
  if (kind === "call") {
    return h("article.card.call", {}, h("header", {}, "calls ", h("b", {}, name || "a tool")), h("pre", {}, folded(pretty(text))));
  }
  if (kind === "result") {
    return h("article.card.result", {}, h("header", {}, "result ", h("b", {}, name || "")), h("pre", {}, folded(pretty(text))));
  }
  if (kind === "raw") return h("article.card", {}, h("header", {}, role), h("pre", {}, folded(text)));
  if (kind === "reasoning") {
    const body = h("div.body");
    const details = h("details.card.reasoning", { open: text.length < 1200 }, h("summary", {}, `reasoning · ${count(text.length)} characters`), body);
    body.append(...markdown(text.slice(0, LONGEST), 60), ...rest(text));
    return details;
  }
  return h(`article.card.text.from-${role}`, {}, h("header", {}, role), h("div.body", {}, ...markdown(text.slice(0, LONGEST), 80), ...rest(text)));
}

function rest(text) {
  return text.length > LONGEST ? [h("pre.rest", {}, folded(text.slice(LONGEST)))] : [];
}

function folded(text) {
  return text.length > LONGEST ? `${text.slice(0, LONGEST)}\n… ${count(text.length - LONGEST)} more characters, in the tokens` : text;
}

function pretty(text) {
  if (text.length > 20000) return text;
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}
