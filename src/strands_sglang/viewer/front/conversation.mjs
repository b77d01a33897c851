// The conversation next to the tokens: messages, tool calls and results as they were said, or rendered; images.

import { counted, h } from "./dom.mjs";
import { markdown } from "./markdown.mjs";
import { harmless } from "./text.mjs";

const LONGEST = 6000; // characters of a part that are shown at first

export class Conversation {
  /** @param {(turn: number) => void} choose told the turn whose message is clicked */
  constructor(viewport, choose) {
    this.viewport = viewport;
    this.choose = choose;
    this.rendered = false;
  }

  /** Show the messages of a path of turns: `[{turn, number, said, images}]`, `said` being `[role, kind, text, name]`. */
  show(turns, empty) {
    this.turns = turns;
    this.current = null;
    this.viewport.replaceChildren(...(turns.length ? turns.map((turn) => this.section(turn)) : [h("p.empty", {}, empty)]));
  }

  /** Show what the model said as Markdown, or as it was said. */
  render(rendered) {
    const { current, answered } = this;
    this.rendered = rendered;
    if (!this.turns.length) return;
    this.show(this.turns);
    this.follow(current, answered);
  }

  /** Bring the messages of a turn into view, or its answer, in step with the tokens. */
  follow(turn, answered = false) {
    if (turn === this.current && answered === this.answered) return;
    this.current = turn;
    this.answered = answered;
    this.viewport.querySelector(".now")?.classList.remove("now");
    const own = this.viewport.querySelector(`[data-turn="${turn}"]`);
    if (!own) return;
    own.classList.add("now");
    const from = (answered && own.querySelector(".answer")) || own;
    this.viewport.scrollTop = from.offsetTop - 8;
  }

  /** Bring the final answer into view. */
  showAnswer() {
    const answer = [...this.viewport.querySelectorAll(".answer")].at(-1);
    if (answer) this.viewport.scrollTop = answer.offsetTop - 8;
  }

  section({ turn, number, said, images, differs }) {
    const section = h("section.messages", { "data-turn": turn, "aria-label": number === null ? "Episode" : `Turn ${number}`, onclick: () => this.choose(turn) });
    if (number !== null) section.append(h("p.turn-name", {}, `Turn ${number}`));
    if (differs) section.append(comparison(number, differs));
    const pictures = [...images];
    const answer = said.findLastIndex(([role]) => role !== "assistant") + 1;
    for (const [i, part] of said.entries()) {
      const shown = card(part, part[1] === "image" ? pictures.shift() : null, this.rendered);
      shown.classList.toggle("answer", i === answer);
      shown.classList.toggle("history", number !== null && i < answer && part[0] === "assistant");
      section.append(shown);
    }
    for (const picture of pictures) section.append(card(["user", "image"], picture));
    return section;
  }
}

/** Two parts from where they differ. */
function comparison(number, { other, recorded, sent }) {
  const texts = [recorded?.[2] ?? "", sent[2]];
  let same = 0;
  while (same < texts[0].length && texts[0][same] === texts[1][same]) same++;
  const from = Math.max(0, same - 60);
  const excerpt = (part) => {
    if (!part) return h("p.empty", {}, "nothing");
    const [role, kind, text, name] = part;
    return card([role, kind, (from ? "…" : "") + text.slice(from, same + 400), name], null, false);
  };
  return h(
    "details.differs",
    { onclick: (event) => event.stopPropagation() },
    h("summary", {}, "Compare what was recorded with what was sent"),
    h("p", {}, `Recorded in turn ${other}:`),
    excerpt(recorded),
    h("p", {}, `Sent in turn ${number}:`),
    excerpt(sent),
  );
}

/** One part of a message, as it was said; or rendered: the model's text as Markdown, and JSON indented. */
export function card([role, kind, text, name], picture, rendered) {
  if (kind === "image") {
    const shown = picture?.url
      ? h("img", { src: picture.url, alt: picture.where || "image of the prompt" })
      : h("p.empty", {}, "an image that the page does not hold");
    return h("article.card.image", {}, h("header", {}, `${role} · image`), shown);
  }
  if (kind === "call" || kind === "result") {
    const head = h("header", {}, kind === "call" ? "calls " : "result ", h("b", {}, name || (kind === "call" ? "a tool" : "")));
    return h(`article.card.${kind}`, {}, head, ...plain(rendered ? indented(text) : text));
  }
  const own = rendered && role === "assistant" ? markdown(text) : null;
  const body = own ? [own] : plain(text);
  if (kind === "reasoning") {
    const summary = h("summary", {}, `reasoning · ${counted(text.length, "character")}`);
    return h("details.card.reasoning", { open: text.length < 1200 }, summary, ...body);
  }
  const note = rendered && role === "assistant" && !own ? " · too long to render" : "";
  return h(`article.card.text.from-${role}`, {}, h("header", {}, role, note), ...body);
}

/** A text with its white space; a long one with a button for the rest. */
function plain(text) {
  const shown = h("pre", {}, text.slice(0, LONGEST));
  if (text.length <= LONGEST) return [shown];
  const all = (event) => {
    event.stopPropagation();
    event.target.remove();
    shown.textContent = harmless(text);
  };
  return [shown, h("button.more", { type: "button", onclick: all }, counted(text.length - LONGEST, "more character"))];
}

/** JSON with line breaks, if nothing but white space changes. */
function indented(text) {
  if (text.length > 20000) return text;
  try {
    const value = JSON.parse(text);
    const dense = text.replace(/("(?:[^"\\]|\\.)*")|\s+/g, "$1");
    return JSON.stringify(value) === dense ? JSON.stringify(value, null, 2) : text;
  } catch {
    return text;
  }
}
