// The turns of an episode as a tree: agents apart, forks indented, a turn that extends the one above not.

import { count, counted, h, number } from "./dom.mjs";

const ID = /^[0-9a-f-]{32,36}$/;

/** What the words of a turn mean, and the signs of those that have one. */
const STATES = {
  opens: ["begins with a prompt of its own: nothing recorded is continued", "●"],
  extends: ["continues an earlier turn, whose tokens it keeps", "│"],
  forks: ["continues an earlier turn that another one continues too, so it is in a sequence of its own", "↳"],
  auxiliary: ["a call next to the agent's work, such as a summary; it is not trained", "◇"],
  asked: ["the request is under way"],
  answered: ["the answer is recorded, and no later turn continues it"],
  committed: ["a later turn continues the answer"],
  final: ["the agent's messages end with this answer"],
  discarded: ["the agent threw the answer away; it is not trained", "✕"],
  cut: ["the request was aborted, or the answer could not be parsed", "✂"],
  failed: ["no answer came", "!"],
  resumed: ["the answer was sampled in parts, because the server paused or was interrupted", "↻"],
  constrained: ["a grammar chose among the tokens, so it is not trained"],
  "context full": ["the end of the context cut the answer off"],
  "waits to resume": ["the answer is not complete yet"],
};

/** The words for what a turn is, the most telling first. */
export function marks(turn) {
  const words = [
    turn.branching,
    turn.auxiliary && "auxiliary",
    turn.status,
    turn.resumed && "resumed",
    turn.constrained && "constrained",
    turn.clamped && turn.finish === "length" && "context full",
    turn.waits && "waits to resume",
  ];
  return words.filter(Boolean);
}

/** What is said up to a turn, its answer included. */
function path(turns, at) {
  const parts = [];
  for (let turn = turns[at]; turn; turn = turns[turn.parent]) parts.unshift(...turn.said);
  return parts;
}

/**
 * Where the messages of a turn leave those that it was compared with.
 *
 * @returns {{other: number, recorded: string[]|undefined, sent: string[]}|null} the number of the other turn, and the
 *     first part that differs; null if the turn was not compared, or differs in something else
 */
export function difference(turns, at) {
  const other = Number(/compared with turn (\d+)/.exec(turns[at].reason)?.[1]);
  const compared = turns.findIndex((turn) => turn.number === other);
  if (compared < 0) return null;
  const [recorded, sent] = [path(turns, compared), path(turns, at)];
  const asked = sent.findLastIndex(([role]) => role !== "assistant") + 1;
  const k = sent.slice(0, asked).findIndex((part, i) => String(part) !== String(recorded[i]));
  return k < 0 ? null : { other, recorded: recorded[k], sent: sent[k] };
}

/** The words of the turns of an episode, with their signs and what they mean. */
export function states(turns) {
  const used = new Set(turns.flatMap(marks));
  const known = Object.entries(STATES).filter(([word]) => used.has(word));
  return known.map(([word, [meaning, sign]]) => [sign ? `${sign} ${word}` : word, meaning]);
}

/** The sign of a turn. */
function sign(turn) {
  const words = marks(turn);
  const telling = ["discarded", "cut", "failed", "auxiliary", "resumed"].find((word) => words.includes(word));
  return STATES[telling ?? turn.branching][1];
}

/**
 * Order turns for display: by agent, in the order of their first calls, then each tree depth first. `turn` of a row is a
 * position in `turns`; an agent whose id is no name is called by its number.
 */
export function treeRows(turns) {
  const children = turns.map(() => []);
  const roots = new Map();
  turns.forEach((turn, i) => {
    const agent = turn.agent ?? "";
    if (turn.parent !== null) children[turn.parent].push(i);
    else roots.set(agent, [...(roots.get(agent) ?? []), i]);
  });
  const rows = [];
  let unnamed = 0;
  for (const [agent, own] of roots) {
    if (agent) rows.push({ agent, name: `Agent ${ID.test(agent) ? ++unnamed : agent}` });
    else if (roots.size > 1) rows.push({ agent, name: "Outside an agent's loop" });
    const open = own.map((turn) => ({ turn, depth: 0 })).reverse();
    while (open.length) {
      const { turn, depth } = open.pop();
      rows.push({ turn, depth });
      const next = children[turn];
      open.push(...next.map((one) => ({ turn: one, depth: depth + (next.length > 1) })).reverse());
    }
  }
  return rows;
}

/** One row of the tree. */
export function treeRow(row, turns, { found, choose }) {
  if (row.agent !== undefined) return h("div.agent", { title: row.agent }, row.name);
  const turn = turns[row.turn];
  const alarms = found.get(turn.number);
  const figures = [
    `${count(turn.prompt[1] - turn.prompt[0])} + ${counted(turn.sampled[1] - turn.sampled[0], "token")}`,
    turn.seconds !== null && `${number(turn.seconds, 3)} s`,
    turn.cached !== null && turn.asked && `cache ${Math.round((100 * turn.cached) / turn.asked)}%`,
    turn.reward !== null && `reward ${turn.reward}`,
  ];
  const words = marks(turn).filter((word) => !turn.reason.startsWith(word));
  const button = h(
    `button.turn.${turn.status}`,
    { type: "button", onclick: () => choose(row.turn), "data-turn": row.turn, tabindex: -1 },
    h("span.sign", { "aria-hidden": "true" }, sign(turn)),
    h(
      "span.lines",
      {},
      h("span", {}, h("b", {}, `Turn ${turn.number}`), ...words.map((word) => ` · ${word}`), alarms && h("span.alarm", {}, ` ⚑ ${alarms}`)),
      h("span.why", {}, [turn.reason, turn.note, turn.failure].filter(Boolean).join(" — ")),
      h("span.figures", {}, figures.filter(Boolean).join(" · ")),
    ),
  );
  button.style.paddingLeft = `${10 + Math.min(row.depth, 8) * 12}px`;
  return button;
}
