// How an episode was scored and ended, as chips.

import { h, number } from "./dom.mjs";

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
