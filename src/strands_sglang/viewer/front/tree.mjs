// The turns of an episode as a tree: agents apart, forks indented, a turn that extends the one above not.

import { count, h, seconds } from "./dom.mjs";

/** Signs of what a turn is; each comes with its word. */
export const SIGNS = {
  opens: "●",
  extends: "│",
  forks: "↳",
  discarded: "✕",
  auxiliary: "◇",
  cut: "✂",
  failed: "!",
  resumed: "↻",
};

/** The words for what a turn is, the most telling first. */
export function marks(turn) {
  const words = [turn.branching];
  if (turn.auxiliary) words.push("auxiliary");
  if (["discarded", "cut", "failed"].includes(turn.status)) words.push(turn.status);
  else if (turn.status) words.push(turn.status);
  if (turn.resumed) words.push("resumed");
  if (turn.constrained) words.push("constrained");
  if (turn.clamped) words.push("clamped");
  if (turn.waits) words.push("waits to resume");
  return words;
}

/** The sign of a turn. */
export function sign(turn) {
  if (["discarded", "cut", "failed"].includes(turn.status)) return SIGNS[turn.status];
  if (turn.auxiliary) return SIGNS.auxiliary;
  if (turn.resumed) return SIGNS.resumed;
  return SIGNS[turn.branching];
}

/**
 * Order turns for display: by agent, in the order of their first calls, then each tree depth first.
 *
 * @returns {({agent: string}|{turn: number, depth: number})[]} `turn` is a position in `turns`
 */
export function treeRows(turns) {
  const children = turns.map(() => []);
  const roots = new Map();
  turns.forEach((turn, i) => {
    if (turn.parent !== null && turn.parent !== undefined) children[turn.parent].push(i);
    else {
      const agent = turn.agent ?? "";
      if (!roots.has(agent)) roots.set(agent, []);
      roots.get(agent).push(i);
    }
  });
  const rows = [];
  for (const [agent, own] of roots) {
    if (agent || roots.size > 1) rows.push({ agent: agent || "outside an agent's loop" });
    const open = own.map((turn) => ({ turn, depth: 0 })).reverse();
    while (open.length) {
      const { turn, depth } = open.pop();
      rows.push({ turn, depth });
      const next = children[turn];
      for (let k = next.length - 1; k >= 0; k--) open.push({ turn: next[k], depth: depth + (next.length > 1 ? 1 : 0) });
    }
  }
  return rows;
}

/** One row of the tree. */
export function treeRow(row, turns, { current, found, choose }) {
  if (row.agent !== undefined) {
    return h("div.agent", {}, "Agent ", h("b", {}, row.agent));
  }
  const turn = turns[row.turn];
  const figures = [`${count(turn.prompt[1] - turn.prompt[0])} + ${count(turn.sampled[1] - turn.sampled[0])} tok`];
  if (turn.seconds !== null && turn.seconds !== undefined) figures.push(seconds(turn.seconds));
  if (turn.cached !== null && turn.cached !== undefined && turn.asked) {
    figures.push(`cache ${Math.round((100 * turn.cached) / turn.asked)} %`);
  }
  if (turn.reward !== null && turn.reward !== undefined) figures.push(`reward ${turn.reward}`);
  const button = h(
    `button.turn.${turn.status || "known"}${row.turn === current ? ".chosen" : ""}`,
    { type: "button", onclick: () => choose(row.turn), title: turn.reason, "aria-current": row.turn === current ? "true" : null, tabindex: row.turn === current ? 0 : -1 },
    h("span.sign", { "aria-hidden": "true" }, sign(turn)),
    h(
      "span.lines",
      {},
      h("span.what", {}, h("b", {}, `Turn ${turn.number}`), " ", marks(turn).join(" · "), found ? h("span.alarm", {}, ` ⚑ ${found}`) : null),
      h("span.why", {}, [turn.reason, turn.note, turn.failure].filter(Boolean).join(" — ") || "no reason recorded"),
      h("span.figures", {}, figures.join(" · ")),
    ),
  );
  const holder = h("div.branch", {}, button);
  holder.style.paddingLeft = `${Math.min(row.depth, 8) * 12}px`;
  return holder;
}
