// How an episode was scored: chips for tables, and the card that says why.

import { definitions, h, number } from "./dom.mjs";

/** A reward: success, none of it, or something between. */
export function rewardChip(reward, success = 1) {
  if (reward === null) return h("span.chip", {}, "–");
  const kind = reward >= success ? "good" : reward <= 0 ? "bad" : "part";
  return h(`span.chip.${kind}`, {}, number(reward, 3));
}

/** How an episode ended. */
export function outcomeChip(outcome) {
  if (!outcome) return "–";
  const kind = outcome === "task_complete" ? "" : /error|timeout|aborted|cancelled/.test(outcome) ? ".bad" : ".part";
  return h(`span.chip${kind}`, {}, outcome.replaceAll("_", " "));
}

/** Why an episode of an evaluation has its reward; nothing for others. */
export function scoreCard(head, score, success) {
  if (!score.length) return [];
  const result = h("p", {}, h("b", {}, "Score "), rewardChip(head.reward, success), " ", outcomeChip(head.outcome));
  return [result, definitions(score)];
}
